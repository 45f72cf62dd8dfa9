"""HOW to run a plan: tensors, forward pass, sampling."""
