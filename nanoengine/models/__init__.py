"""Models: Llama and Qwen3 in one file, other families in the files next to it, one kernel set per
device."""
