"""A constructor with all arguments that a cluster's config file sets, and the model's defaults."""

import os
import sys

from vllm import LLM, SamplingParams

engine_args = {
    "model": sys.argv[1],
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "tensor_parallel_size": int(os.environ.get("TP", "1")),
    "pipeline_parallel_size": 1,
    "dtype": "float",
    "seed": None,
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": True,
    "load_format": "safetensors",
    "generation_config": "auto",
    "limit_mm_per_prompt": {"image": 0},
    "enable_prefix_caching": True,
    "enable_chunked_prefill": None,
    "quantization": None,
    "distributed_executor_backend": "mp",
    "disable_log_stats": True,
}
llm = LLM(**engine_args)
default = llm.get_default_sampling_params()
print(default)
assert isinstance(default, SamplingParams)
(plain,) = llm.generate("Once upon a time")
assert len(plain.outputs[0].token_ids) <= default.max_tokens
params = SamplingParams(
    n=1,
    best_of=1,
    use_beam_search=False,
    temperature=default.temperature,
    repetition_penalty=1.1,
    spaces_between_special_tokens=False,
    skip_special_tokens=True,
    max_tokens=20,
    stop=["</s>", "\n\n"],
    stop_token_ids=[2],
    bad_words=["fox"],
)
(output,) = llm.generate("There was a little", params)
print(output.outputs[0].text)
assert "fox" not in output.outputs[0].text
