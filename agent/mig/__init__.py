"""Mode mig: instances of GPUs in MIG mode, which others made."""
