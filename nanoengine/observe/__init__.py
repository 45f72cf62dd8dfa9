"""Observability of the engine: metrics, traces, progress."""
