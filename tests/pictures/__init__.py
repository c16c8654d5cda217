"""Pictures of the documents, made of real runs: `make pictures`."""
