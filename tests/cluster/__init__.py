"""A real one-node Kubernetes, built from pinned sources and started by pytest fixtures."""
