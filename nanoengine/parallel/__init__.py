"""A batch over several engines: replicas on this machine, and Ray."""
