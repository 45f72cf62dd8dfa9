"""Compiled kernels that layers and attention call: flat arrays and ints, nothing of the package."""
