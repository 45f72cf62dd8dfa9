"""Offline throughput: random token ids, dummy weights, no end of sequence."""

import argparse
import random
import time

from vllm import LLM, SamplingParams


def main(args):
    random.seed(0)
    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=512,
        max_num_seqs=args.num_prompts,
        enforce_eager=False,
        disable_log_stats=True,
    )
    prompts = [
        {"prompt_token_ids": [random.randint(3, 1000) for _ in range(random.randint(8, 64))]}
        for _ in range(args.num_prompts)
    ]
    params = [
        SamplingParams(
            temperature=0.6,
            ignore_eos=True,
            max_tokens=random.randint(4, 16),
            detokenize=False,
        )
        for _ in range(args.num_prompts)
    ]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    total = sum(one.max_tokens for one in params)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == total
    print(f"Total: {total}tok, Time: {elapsed:.2f}s, Throughput: {total / elapsed:.2f}tok/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=32)
    main(parser.parse_args())
