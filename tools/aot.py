"""Writes the list of functions that are compiled at installation: `python tools/aot.py`.

It runs the demo model in the usual configurations and small GGUF files of all common types, and
writes the argument types of each kernel call to `nanoengine/kernels/aot.txt`. A test compares: run
it when a kernel's arguments have changed. With `--check` it only prints the differences.
"""

from __future__ import annotations

import re
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numba

from benchmarks.suite.shapes import write_shape
from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.kernels.aot import TABLE
from nanoengine.kernels.linking import Kernel
from nanoengine.layers import packed
from tests.support.gguf_files import make_gguf

PROMPT = {"prompt_token_ids": list(range(1, 9))}
GREEDY = SamplingParams(max_tokens=3, temperature=0)
SAMPLED = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=1)
TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
LAYERS = ["full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma3": {"layer_types": LAYERS * (len(TYPES) // 2)},
}  # fmt: skip
"""Dense models with and without biases, norms of heads and post-norms -> fields of the config."""


def type_of(name: str) -> str:
    """The type of a matrix in a file that has all types, one per layer."""
    layer = re.match(r"blk\.(\d+)", name)
    return TYPES[int(layer[1])] if layer else "Q6_K"


def run(model: Path, **form: Any) -> None:
    """One stream and a batch, greedy and sampled."""
    with LLM(model, skip_tokenizer_init=True, num_kv_blocks=64, **form) as llm:
        for prompts, params in ((1, GREEDY), (1, SAMPLED), (9, GREEDY), (9, SAMPLED)):
            llm.generate([PROMPT] * prompts, params, use_tqdm=False)


def signatures() -> list[str]:
    """The lines of the list."""
    called: set[str] = {"pool.serve (int64,)"}  # compiled in advance by threads
    ask = Kernel._compile_for_args

    def note(kernel: Kernel, *arguments: Any, **kws: Any) -> Any:
        kinds = tuple(numba.typeof(value) for value in arguments)
        called.add(f"{kernel.qualified_name.removeprefix('nanoengine.kernels.')} {kinds!r}")
        return ask(kernel, *arguments, **kws)

    Kernel._compile_for_args = note
    for dtype, quantization in product(("float32", "bfloat16"), (None, "int8", "int4")):
        run(demo_model_path(), dtype=dtype, quantization=quantization)
    packed.MIN_PRUNED_BYTES = 0  # the heads of these models are too small for the pruned argmax
    with tempfile.TemporaryDirectory() as directory:
        write_shape("tiny", Path(directory))  # in float32; the demo model is in bfloat16
        run(Path(directory), dtype="float32", load_format="dummy")
        size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": len(TYPES)}
        size |= {"num_attention_heads": 4, "head_dim": 64}
        for family, fields in FAMILIES.items():
            path = Path(directory, f"{family}.gguf")
            make_gguf(path, family, types=type_of, **size, **fields)
            run(path, dtype="float32")
    for dtype in ("float32", "bfloat16"):
        run(demo_model_path(), dtype=dtype)
    return sorted(called)


def main() -> int:
    """Writes the list; with `--check`, the exit status says whether it was up to date."""
    text = "\n".join(signatures()) + "\n"
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    known = set(TABLE.read_text(encoding="utf-8").splitlines())
    for line in sorted(known ^ set(text.splitlines())):
        print("not in the table:" if line not in known else "not called:", line)
    return int(known != set(text.splitlines()))


if __name__ == "__main__":
    sys.exit(main())
