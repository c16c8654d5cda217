"""Tests that need a real GPU: `make test-gpu`, or `tests/gpu/offline` without network. README.md has more."""
