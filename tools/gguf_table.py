"""Prints the accuracy of GGUF files, which docs/gguf.md summarizes: `python tools/gguf_table.py`.

Each architecture and each type is a tiny GGUF file with random weights, written as by llama.cpp's
converter (`tests/support/gguf_files.py`). Its logits are compared with transformers' logits for the
values in the file: the largest difference, without quantization of the activations.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf.quants import QuantError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanoengine.checkpoint.gguf import read_gguf
from tests.models.test_gguf import CASES, PROMPTS, TYPES, WIDE, found_logits
from tests.support.gguf_files import make_gguf
from tests.support.model_helpers import transformers_logits


def difference(family: str, option: str | None, **how: Any) -> tuple[str, float]:
    """The architecture in the file, and the largest difference of its logits."""
    fields = how.pop("fields", {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        model = make_gguf(file, family, **how)
        named = read_gguf(file).metadata["general.architecture"]
        found = found_logits(file, option, **fields)
        return named, (found - transformers_logits(model, PROMPTS)).abs().max().item()


def of_type(name: str) -> Callable[[str], str]:
    """Each matrix in this type."""
    return lambda tensor: name


def main() -> None:
    """Both tables."""
    print("| in the file | model | F32 | Q8_0 |\n|---|---|---|---|")
    for case, (family, overrides) in CASES.items():
        fields = {"max_positions": 64} if case == "phi3 longrope" else {}
        named, plain = difference(family, None, **overrides, fields=fields)
        try:
            how = {**overrides, "fields": fields, "types": of_type("Q8_0")}
            blocks = f"{difference(family, 'gguf_weight_only', **how)[1]:.0e}"
        except QuantError:  # this tiny model has rows whose length is not a multiple of 32
            blocks = ""
        print(f"| {named} | {case} | {plain:.0e} | {blocks} |")
    print("\n| type | largest difference |\n|---|---|")
    for name in TYPES:
        _, found = difference("llama", "gguf_weight_only", **WIDE, types=of_type(name))
        print(f"| {name} | {found:.0e} |")


if __name__ == "__main__":
    main()
