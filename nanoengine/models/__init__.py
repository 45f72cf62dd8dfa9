"""Models: `decoder.py` has Llama and Qwen3, `generic.py` and its neighbours all other families;
`cpu.py` and `triton.py` are the kernel sets of the two kinds of devices."""
