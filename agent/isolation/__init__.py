"""vGPU limits inside containers: limit files, usage regions, the enforcement library, which fences hold."""
