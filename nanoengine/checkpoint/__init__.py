"""Checkpoint files: config, quantization and weights; they are read before anything is built."""
