"""Builds the enforcement library from the C files in `agent/vgpu/clib`. The agent imports none of it."""
