"""Measurements, one subject a file; each registers its figures with `tests.bench.registry.measurement`."""
