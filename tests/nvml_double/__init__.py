"""The simulated machine's C face: a `libnvidia-ml.so.1` of our own, for the real binding to load."""
