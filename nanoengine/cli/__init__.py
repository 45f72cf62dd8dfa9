"""The command line, derived from the config."""
