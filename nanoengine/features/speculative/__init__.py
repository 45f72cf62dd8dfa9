"""Speculative decoding: drafters, and the decision how many tokens to draft for each sequence."""
