"""A checkpoint as files: its config, its quantization; read before anything is built."""
