"""Looking at the engine: metrics, traces, progress."""
