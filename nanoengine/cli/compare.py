"""`nanoengine compare`: what quantization, a cache dtype or another file changes in a model."""

from nanoengine.bench.compare import CompareArgs, main

__all__ = ["CompareArgs", "main"]
