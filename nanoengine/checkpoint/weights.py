"""Weights: loads a checkpoint's files, or seeded random numbers, into the slots of a model's
layers.

Strict: every slot is filled by exactly one tensor of the right shape, and every tensor has a slot,
or nothing is loaded. Called by `models/loader.py`, which collects a model's slots.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.files import Stored, read_tensors
from nanoengine.checkpoint.slots import TensorNames, WeightSlot
from nanoengine.errors import WeightLoadError
from nanoengine.settings.checks import join_names

HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias)")
"""Tensors in old checkpoints that are computed here."""

ROWS_COMPARED = 4096
"""Rows of two tensors that are compared at a time, so that neither is in memory as a whole."""


def check_sizes(config: ModelConfig, stored: Mapping[str, Stored], names: TensorNames) -> None:
    """Compares config.json with the tensors' shapes, before anything of these sizes is allocated.

    `load_weights` compares every shape, but only after the model has been allocated.

    Raises:
        WeightLoadError: they contradict each other; names key, value, tensor and shape.
    """
    if config.num_hidden_layers > len(stored):
        raise WeightLoadError(
            f"config.json has num_hidden_layers={config.num_hidden_layers}, but the files hold"
            f" {len(stored)} tensors"
        )

    def check(key: str, size: int, axis: int, ours: str) -> None:
        name = names(ours)
        shape = stored[name].shape if name in stored else ()
        if len(shape) > axis and shape[axis] != size:
            raise WeightLoadError(f"config.json has {key}={size}, but {name} is {list(shape)}")

    def check_outputs(key: str, size: int, name: str) -> None:
        outputs = int(config.plan.transposed_matrices)
        for part, axis in (("weight", outputs), ("weight_packed", 0), ("scales", 1)):
            check(key, size, axis, f"{name}.{part}")

    check("vocab_size", config.vocab_size, 0, "model.embed_tokens.weight")
    check("hidden_size", config.hidden_size, 1, "model.embed_tokens.weight")
    name, kv_heads = f"model.layers.{config.attending[0]}.self_attn", config.num_key_value_heads
    heads, gates = config.num_attention_heads, "2 * " if config.plan.output_gate == "q_proj" else ""
    for key, count, part in (
        (f"{gates}num_attention_heads", 2 * heads if gates else heads, "q_proj"),
        ("num_key_value_heads", kv_heads, "k_proj"),
        ("heads of q, k and v", heads + 2 * kv_heads, "qkv_proj"),
    ):
        if config.plan.latent is None and config.plan.gemma4 is None:
            check_outputs(f"{key} * head_dim", count * config.head_dim, f"{name}.{part}")
    sparse = config.moe.layers if config.moe else ()
    for layer in range(0 if config.plan.gemma4 else config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        if config.moe is None or layer not in sparse:
            for matrix, count in (("gate_proj", 1), ("up_proj", 1), ("gate_up_proj", 2)):
                size = count * config.intermediate_size
                check_outputs("intermediate_size", size, f"{mlp}.{matrix}")
            continue
        size = config.moe.intermediate_size
        check("num_experts", config.moe.num_experts, 0, f"{mlp}.gate.weight")
        axis = 1 if config.moe.inputs_first else 2
        check("moe_intermediate_size", size, axis, f"{mlp}.experts.down_proj")
        check_outputs("moe_intermediate_size", size, f"{mlp}.experts.0.gate_proj")


def drop_copy(stored: dict[str, Stored], name: str, original: str) -> None:
    """Drops a tied head that a checkpoint also stores under a second name.

    Raises:
        WeightLoadError: the two differ.
    """
    copy = stored.pop(name, None)
    if copy is None or original not in stored:
        return
    other, same = stored[original], copy.shape == stored[original].shape
    for start in range(0, copy.shape[0] if same else 0, ROWS_COMPARED):
        part = (slice(start, start + ROWS_COMPARED),)
        ((_, mine),) = read_tensors(copy.file, {name: part})
        ((_, its),) = read_tensors(other.file, {original: part})
        same = same and torch.equal(mine, its.to(mine.dtype))
    if not same:
        raise WeightLoadError(
            f"config.json has tie_word_embeddings=True, but {name} differs from {original}: set it"
            " to false, or delete that tensor, in a copy of the checkpoint"
        )


def load_weights(slots: dict[str, WeightSlot], stored: Mapping[str, Stored]) -> None:
    """Fills each of a model's slots from exactly one stored tensor.

    float32, float16, bfloat16 and float64 tensors are converted to the model's dtype. Peak memory
    is the model's own plus one tensor and `MAPPED_BYTES`.

    Raises:
        WeightLoadError: names or shapes don't match the model, which the message names, or a file
            can't be read.
    """
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    slots = _matched(slots, shapes)
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
            waiting.remove(name)  # Why: a method may have packed a slot that was filled
            with torch.no_grad():
                slots[name].store(tensor)
    assert not waiting, waiting


def dummy_weights(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Fills slots with seeded random numbers, normal(0, 0.02) and norms near 1, for benchmarks.

    Every tensor is cut from one bank of numbers at a position derived from its name. A memory copy
    is faster than a random generator, and every number of ranks gets the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    bank = torch.empty(1_000_003).normal_(0, 0.02, generator=generator)  # a prime: no row repeats
    for name, slot in slots.items():
        if slot.absent:
            slot.absent()
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


def _matched(
    slots: dict[str, WeightSlot], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, WeightSlot]:
    """The slots to fill, after checking that they and the stored tensors are the same set."""
    waiting = list(slots.items())
    for name, slot in waiting:
        if slot.pieces_only or (slot.pieces and name not in stored):
            slots.pop(name, None)
            waiting += slot.pieces.items()
        elif slot.absent and (name not in stored or slots.get(name, slot) is not slot):
            # Why the second: a layer's own slot, such as its bias, takes precedence over a piece of
            # that name.
            if slots.get(name) is slot:
                slots.pop(name)
            slot.absent()
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
