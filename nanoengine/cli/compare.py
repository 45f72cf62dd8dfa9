"""`nanoengine compare`: how quantization, a cache dtype or another file changes a model."""

from nanoengine.bench.compare import CompareArgs, main

__all__ = ["CompareArgs", "main"]
