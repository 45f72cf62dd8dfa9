"""Compiled kernels that layers and attention call. They know only flat arrays and ints."""
