"""vLLM's CPU backend, compiled, with prefix caching, in this process."""

import os

import harness
from harness import Loaded, Options

from nanoengine.bench.workload import WorkItem

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def start(options: Options) -> Loaded:
    """Loads the checkpoint, which compiles it at the first start of a version."""
    default = options.quantization == "default"
    os.environ |= SETTINGS | {
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_gib(2 if default else 4)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
    }
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(options.model),
        dtype="auto" if default else "float32",
        max_model_len=max(2048, options.longest + 16),
        max_num_seqs=options.batch,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )

    def generate(requests: list[WorkItem]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
            )
            for _, n in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    chosen = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    bits = 32 if chosen == "float32" else 16
    return Loaded(
        generate=generate,
        version=vllm.__version__,
        dtype=chosen,
        body_bits=bits,
        head_bits=bits,
        kv_bits=bits,
    )


if __name__ == "__main__":
    harness.main("vllm", start, ("none", "default"))
