"""TensorNames: what the tensors of our modules are called in one checkpoint.

Our modules are named as Llama's. A family calls some parts otherwise (`ModelConfig.tensor_names`),
and a checkpoint may put the whole model below another prefix: a text part beside a vision tower, or
a model without a head. Called by the loader, so all errors name what the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from nanoengine.checkpoint.slots import WeightSlot

PREFIXES = {
    "model.": "lm_head.",
    "": "lm_head.",
    "model.language_model.": "lm_head.",
    "language_model.model.": "language_model.lm_head.",
}
"""What may stand for our "model." -> what stands for "lm_head." beside it."""


class TensorNames:
    """Ours -> the checkpoint's: `names("model.norm.weight")`.

    Args:
        parts: see `ModelConfig.tensor_names`.
        stored: the names in the checkpoint, by which the prefix is found; without an embedding
            among them it is ours.
    """

    def __init__(self, parts: Mapping[str, str], stored: Collection[str] = ()) -> None:
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in stored]
        self._prefix = (found or ["model."])[0]
        self._parts = parts
        longest_first = sorted(map(re.escape, parts), key=len, reverse=True)
        self._known = re.compile(rf"(?<![^.])({'|'.join(longest_first)})(?![^.])")

    def __call__(self, name: str) -> str:
        if self._parts:
            name = self._known.sub(lambda match: self._parts[match[0]], name)
        if name.startswith("lm_head."):
            return PREFIXES[self._prefix] + name.removeprefix("lm_head.")
        return self._prefix + name.removeprefix("model.")

    def of(self, slots: Mapping[str, WeightSlot]) -> dict[str, WeightSlot]:
        """The slots, and their pieces, by the checkpoint's names."""
        return {
            self(name): replace(slot, pieces=self.of(slot.pieces)) if slot.pieces else slot
            for name, slot in slots.items()
        }
