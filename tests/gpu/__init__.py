"""What needs a real GPU: `make test-gpu`, or `tests/gpu/offline` without network. README.md tells more."""
