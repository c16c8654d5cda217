"""Limits of vGPU containers: their files, the library that enforces them, and who watches over both."""
