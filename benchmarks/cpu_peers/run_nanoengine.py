"""nanoengine through its public API, defaults but for what is asked."""

import harness
from harness import Loaded, Options
from workloads import Request

BITS = {"none": (32, 32), "int8": (8, 8), "int4": (4.5, 8)}


def start(options: Options) -> Loaded:
    """Loads the checkpoint."""
    import nanoengine
    from nanoengine import LLM, SamplingParams

    quantization = options.quantization
    asked = {} if quantization == "none" else {"quantization": quantization}
    llm = LLM(options.model, dtype=options.dtype, device="cpu", **asked)

    def generate(requests: list[Request]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    body, head = BITS[quantization]
    return Loaded(generate=generate, version=nanoengine.__version__, body_bits=body, head_bits=head)


if __name__ == "__main__":
    harness.main("nanoengine", start, harness.QUANTIZATIONS)
