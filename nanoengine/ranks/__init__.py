"""Tensor parallelism: one model in several processes, each with a part of every layer."""
