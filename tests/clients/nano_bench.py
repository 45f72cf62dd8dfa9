"""A program in nano-vLLM's style: a path, token ids, a list of parameters, a time."""

import os
import sys
import time
from random import randint, seed

from nanovllm import LLM, SamplingParams


def main():
    seed(0)
    num_seqs = 24
    path = os.path.expanduser(sys.argv[1])
    llm = LLM(path, enforce_eager=False, max_model_len=512)
    token_ids = [[randint(0, 1400) for _ in range(randint(10, 40))] for _ in range(num_seqs)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(5, 12))
        for _ in range(num_seqs)
    ]
    llm.generate(["Benchmark: "], SamplingParams())
    t = time.time()
    llm.generate(token_ids, params, use_tqdm=False)
    t = time.time() - t
    total_tokens = sum(sp.max_tokens for sp in params)
    print(f"Total: {total_tokens}tok, Time: {t:.2f}s, Throughput: {total_tokens / t:.2f}tok/s")


if __name__ == "__main__":
    main()
