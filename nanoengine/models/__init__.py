"""Model families, their configs and their weights."""
