"""Which part of a model a rank holds."""
