"""Programs as users of vLLM's offline API write them; `test_clients.py` runs each on the demo
model with only its import changed. Each checks its own results."""
