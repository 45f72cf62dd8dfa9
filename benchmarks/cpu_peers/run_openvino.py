"""OpenVINO GenAI's continuous batching pipeline: paged attention, prefix caching, split prefill.

For float32, arithmetic and KV cache are set to float32, as for the other peers; otherwise they are
OpenVINO's defaults: bfloat16 if the CPU supports it, and an 8-bit KV cache.
"""

import harness
from harness import Loaded, Options

from nanoengine.bench.workload import WorkItem

FOLDERS = {"none": "-ov-fp32", "int8": "-ov-int8", "int4": "-ov-int4", "default": "-ov"}
BITS = {"none": (32, 32, 32), "int8": (8, 8, 8), "int4": (4.5, 8, 8), "default": (16, 16, 8)}


def start(options: Options) -> Loaded:
    """Loads the converted checkpoint."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options.kv_gib()
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = options.batch
    scheduler.max_num_batched_tokens = 4096
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": options.threads,
        "PERFORMANCE_HINT": "THROUGHPUT",
        "NUM_STREAMS": 1,
    }
    if options.quantization == "none":
        properties |= {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
    folder = options.converted_file(FOLDERS)
    core = openvino.Core()
    hint = properties.get("INFERENCE_PRECISION_HINT")
    dtype = hint or core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def settings(count: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config

    def generate(requests: list[WorkItem]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        results = pipeline.generate(prompts, [settings(count) for _, count in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    body, head, kv = BITS[options.quantization]
    return Loaded(
        generate=generate,
        version=genai.__version__.split("-")[0],
        dtype={"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype],
        body_bits=body,
        head_bits=head,
        kv_bits=kv,
    )


if __name__ == "__main__":
    harness.main("openvino", start, harness.QUANTIZATIONS)
