"""Batches on several engines: replicas on this machine, and Ray."""
