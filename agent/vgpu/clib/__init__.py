"""The enforcement library in C, and its build. Nothing of this package is imported by the running agent."""
