"""Shards of a model and the executors that run them."""
