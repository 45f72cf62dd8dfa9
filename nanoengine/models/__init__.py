"""Models: Llama and Qwen3 on one page, other families beside it, and a kernel set a device."""
