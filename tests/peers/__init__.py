"""Other projects' programs beside the extender, on the real API server and scheduler: `make test-peers`."""
