"""nanoengine through its public API, with defaults except for the requested options."""

import harness
from harness import Loaded, Options

from nanoengine.bench.workload import WorkItem

BITS = {"none": (32, 32), "int8": (8, 8), "int4": (4.5, 8)}
FLOAT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def start(options: Options) -> Loaded:
    """Loads the checkpoint."""
    import nanoengine
    from nanoengine import LLM, SamplingParams

    quantization, model = options.quantization, options.model
    settings = {"none": {"dtype": "float32"}, "default": {}}.get(
        quantization, {"dtype": "float32", "quantization": quantization}
    )
    if harness.is_gguf(quantization):
        settings, model = {}, options.converted_file({})
    llm = LLM(model, device="cpu", **settings)
    info = llm.engine.info

    def generate(requests: list[WorkItem]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    # Why from the bytes: weights may stay in 16 bits and be multiplied in float32.
    bits = 16 if info.weight_bytes < 3 * info.num_parameters else 32
    if harness.is_gguf(quantization):
        bits = options.stored_bits(info.num_parameters)
    body, head = BITS.get(quantization, (bits, bits))
    return Loaded(
        generate=generate,
        version=nanoengine.__version__,
        dtype=info.dtype,
        body_bits=body,
        head_bits=head,
        kv_bits=FLOAT_BITS[info.kv_cache_dtype],
    )


if __name__ == "__main__":
    harness.main("nanoengine", start, harness.QUANTIZATIONS, gguf=True)
