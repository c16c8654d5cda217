"""Core and memory of a container on one GPU: who asks, what is free, what was granted."""
