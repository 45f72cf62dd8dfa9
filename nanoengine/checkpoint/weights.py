"""Loads the tensors of a checkpoint, or seeded random numbers, into the weight slots of a model.

Loading is strict: every slot gets exactly one tensor of the right shape, and every tensor has a
slot; otherwise nothing is loaded. Called by `models/loader.py`, which collects the slots.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.files import TensorInfo, read_tensors
from nanoengine.checkpoint.slots import TensorNames, WeightSlot
from nanoengine.errors import WeightLoadError
from nanoengine.settings.checks import join_names

log = logging.getLogger(__name__)

CLASSIFIER_WEIGHT = "score.weight"
"""A classification head, which only `features/pooling.py` reads."""

HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias)")
"""Names of tensors in old checkpoints that are not needed, because the engine computes them."""

ROWS_COMPARED = 4096
"""Rows that are compared at a time, so that no whole tensor is in memory."""


def tensors_to_run(config: ModelConfig, stored: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors without those that are ignored, for example of vision towers or of layers
    for multi-token prediction."""
    if config.headless:
        stored = {name: tensor for name, tensor in stored.items() if name != CLASSIFIER_WEIGHT}
    if not config.ignored_tensors:
        return stored
    matches = {name: re.match(config.ignored_tensors, name) for name in stored}
    parts = sorted({match[0] for match in matches.values() if match})
    if not parts:
        return stored
    kept = {name: tensor for name, tensor in stored.items() if not matches[name]}
    log.warning(
        "only a part of this checkpoint is used: %d of its %d tensors are ignored (%s)",
        len(stored) - len(kept), len(stored), ", ".join(parts),
    )  # fmt: skip
    return kept


def check_sizes(config: ModelConfig, stored: Mapping[str, TensorInfo], names: TensorNames) -> None:
    """Compares sizes in config.json with the shapes of tensors, before the model is allocated.

    `load_weights` compares all shapes, but only after the model is allocated.

    Raises:
        WeightLoadError: they contradict each other; the message has key, value, tensor and shape.
    """
    if config.num_hidden_layers > len(stored):
        raise WeightLoadError(
            f"config.json has num_hidden_layers={config.num_hidden_layers}, but the files have"
            f" only {len(stored)} tensors"
        )

    def check(key: str, size: int, axis: int, ours: str) -> None:
        name = names(ours)
        shape = stored[name].shape if name in stored else ()
        if len(shape) > axis and shape[axis] != size:
            raise WeightLoadError(
                f"config.json has {key}={size}, but {name} has shape {list(shape)}"
            )

    def check_outputs(key: str, size: int, name: str) -> None:
        for part, axis in (("weight", 0), ("weight_packed", 0), ("scales", 1)):
            check(key, size, axis, f"{name}.{part}")

    check("vocab_size", config.vocab_size, 0, "model.embed_tokens.weight")
    check("hidden_size", config.hidden_size, 1, "model.embed_tokens.weight")
    layer, heads, kv_heads = config.plan, config.num_attention_heads, config.num_key_value_heads
    name = f"model.layers.{config.attention_layers[0]}.self_attn"
    gates = "2 * " if layer.output_gate == "q_proj" else ""
    for key, count, part in (
        (f"{gates}num_attention_heads", 2 * heads if gates else heads, "q_proj"),
        ("num_key_value_heads", kv_heads, "k_proj"),
        ("heads of q, k and v", heads + 2 * kv_heads, "qkv_proj"),
    ):
        if layer.mla is None and layer.gemma4 is None:
            check_outputs(f"{key} * head_dim", count * config.head_dim, f"{name}.{part}")
    sparse = config.moe.layers if config.moe else ()
    for index in range(0 if layer.gemma4 else config.num_hidden_layers):
        mlp = f"model.layers.{index}.mlp"
        if config.moe is None or index not in sparse:
            for matrix, count in (("gate_proj", 1), ("up_proj", 1), ("gate_up_proj", 2)):
                size = count * config.intermediate_size
                check_outputs("intermediate_size", size, f"{mlp}.{matrix}")
            continue
        size = config.moe.intermediate_size
        check("num_experts", config.moe.num_experts, 0, f"{mlp}.gate.weight")
        axis = 1 if config.moe.inputs_first else 2
        check("moe_intermediate_size", size, axis, f"{mlp}.experts.down_proj")
        check_outputs("moe_intermediate_size", size, f"{mlp}.experts.0.gate_proj")


def drop_tied_head(stored: dict[str, TensorInfo], name: str, original: str) -> None:
    """Removes a tied language head from `stored`, after comparing it with the embedding.

    Raises:
        WeightLoadError: the two differ.
    """
    head = stored.pop(name, None)
    if head is None or original not in stored:
        return
    embedding, equal = stored[original], head.shape == stored[original].shape
    for start in range(0, head.shape[0] if equal else 0, ROWS_COMPARED):
        part = (slice(start, start + ROWS_COMPARED),)
        ((_, head_rows),) = read_tensors(head.file, {name: part})
        ((_, rows),) = read_tensors(embedding.file, {original: part})
        equal = equal and torch.equal(head_rows, rows.to(head_rows.dtype))
    if not equal:
        raise WeightLoadError(
            f"config.json has tie_word_embeddings=True, but {name} differs from {original}: in a"
            " copy of the checkpoint, set the key to false, or delete the tensor"
        )


def load_weights(slots: dict[str, WeightSlot], stored: Mapping[str, TensorInfo]) -> None:
    """Fills every slot of a model with one stored tensor.

    float32, float16, bfloat16 and float64 tensors are converted to the model's dtype. Peak memory
    is the model, one tensor and `MAPPED_BYTES`.

    Raises:
        WeightLoadError: names or shapes do not match the model, and the message lists them; or a
            file can't be read.
    """
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    slots = _match_slots(slots, shapes)
    by_file: dict[Path, dict[str, tuple[slice, ...]]] = defaultdict(dict)
    for name in stored:
        if name in slots:
            by_file[stored[name].file][name] = slots[name].part
    waiting = set(slots)
    for file, parts in by_file.items():
        for name, tensor in read_tensors(file, parts):
            allowed = slots[name].dtypes
            if tensor.dtype not in allowed if allowed else not tensor.is_floating_point():
                kind = " or ".join(map(str, allowed)) or "floating point"
                raise WeightLoadError(f"{name} in {file} is {tensor.dtype}, not {kind}")
            waiting.remove(name)  # Why remove: a filled slot may be packed, and can't be refilled
            with torch.no_grad():
                slots[name].store(tensor)
    assert not waiting, waiting


def dummy_weights(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Fills slots with seeded random numbers for benchmarks: normal(0, 0.02), and for norms 1 plus
    such numbers.

    Every tensor is a slice of one bank of random numbers, at a position that depends on its name.
    Copying is faster than generating, and the model is the same for any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    # Why a prime: rows of a matrix do not repeat.
    bank = torch.empty(1_000_003).normal_(0, 0.02, generator=generator)
    for name, slot in slots.items():
        if slot.on_missing:
            slot.on_missing()
            continue
        shape = torch.Size(slot.shape)
        start = zlib.crc32(name.encode()) % len(bank)
        copies = (start + shape.numel() - 1) // len(bank) + 1
        numbers = bank.repeat(copies) if copies > 1 else bank
        tensor = numbers[start : start + shape.numel()].view(shape)
        if name.endswith("norm.weight"):
            tensor = tensor + 1.0
        with torch.no_grad():
            slot.store(tensor[slot.part])


def _match_slots(
    slots: dict[str, WeightSlot], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, WeightSlot]:
    """The slots to fill, after checking that they match the stored tensors one to one."""
    waiting = list(slots.items())
    for name, slot in waiting:
        if slot.pieces_only or (slot.pieces and name not in stored):
            slots.pop(name, None)
            waiting += slot.pieces.items()
        elif slot.on_missing and (name not in stored or slots.get(name, slot) is not slot):
            # Why the second condition: a slot of a layer, such as a bias, takes precedence over a
            # piece with the same name.
            if slots.get(name) is slot:
                slots.pop(name)
            slot.on_missing()
        else:
            slots[name] = slot
    unexpected = stored.keys() - slots.keys()
    problems = {
        "missing": sorted(slots.keys() - stored.keys()),
        "unexpected": sorted(name for name in unexpected if not HARMLESS.fullmatch(name)),
        "mis-shaped": [
            f"{name} {list(stored[name])}, expected {list(slot.shape)}"
            for name, slot in slots.items()
            if name in stored and stored[name] != slot.shape
        ],
    }
    if any(problems.values()):
        raise WeightLoadError(
            "the checkpoint's tensors don't match the model; "
            + "; ".join(f"{what}: {join_names(names)}" for what, names in problems.items() if names)
        )
    return slots
