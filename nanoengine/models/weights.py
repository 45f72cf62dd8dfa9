"""Weights: from safetensors files, or from a seed, into the slots that a model's layers offer.

Strict: every slot is filled by exactly one tensor of the right shape, and every tensor has a slot,
or nothing is loaded. Streaming: one tensor at a time, and of a sharded model only this rank's part.
Pickled checkpoints are refused, because reading a pickle runs code.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanoengine.errors import WeightLoadError
from nanoengine.layers.linear import LinearMethod
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.weights import OwnsWeights, WeightSlot
from nanoengine.models.decoder import CausalLM

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias)")
"""Tensors that old checkpoints carry and that are computed here."""

MOST_NAMES = 10
"""Names that one error message lists."""

MAPPED_BYTES = 64 << 20
"""Bytes read before a file is opened anew. Why: a mapped file's pages stay counted as this
process's memory while it is open, so a whole file would double the peak."""


def load_weights(model: CausalLM, directory: str | Path) -> None:
    """Fills the model from `model.safetensors`, or from the files that its index names.

    float32, float16, bfloat16 and float64 tensors are converted to the model's dtype. Peak memory
    is the model's own plus one tensor and `MAPPED_BYTES`.

    Raises:
        WeightLoadError: no safetensors file, a missing or damaged one, or names or shapes that
            don't match the model; the message names them.
    """
    files = checkpoint_files(Path(directory))
    shapes = {file: _stored_shapes(file) for file in files}
    stored = {name: shape for named in shapes.values() for name, shape in named.items()}
    slots = _matched(weight_slots(model), stored, tied=model.lm_head.tied)
    for file in files:
        wanted = [name for name in shapes[file] if name in slots]
        for name, tensor in _read(file, wanted, slots):
            allowed = slots[name].dtypes
            if tensor.dtype not in allowed if allowed else not tensor.is_floating_point():
                kind = " or ".join(map(str, allowed)) or "floating point"
                raise WeightLoadError(f"{name} in {file} is {tensor.dtype}, not {kind}")
            with torch.no_grad():
                slots[name].store(tensor)
    _finish(model)


def dummy_weights(model: CausalLM, seed: int) -> None:
    """Fills the model with seeded random numbers, normal(0, 0.02) and norms near 1, for benchmarks.

    Every tensor is cut from one bank of numbers at a place that its name decides, which takes a
    memory copy instead of a random generator's time, and gives every rank count the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    bank = torch.empty(1_000_003).normal_(0, 0.02, generator=generator)  # a prime: no row repeats
    for name, slot in weight_slots(model).items():
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
    _finish(model)


def weight_slots(model: torch.nn.Module) -> dict[str, WeightSlot]:
    """All slots of a model by checkpoint name."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, OwnsWeights):
            slots.update(module.weight_slots(path))
    return slots


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        WeightLoadError: there are none, or one that the index names is missing.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightLoadError(f"{index} is no index of safetensors files: {error!r}") from error
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise WeightLoadError(f"{index} names files that are missing: {_listed(missing)}")
        return [directory / name for name in names]
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    pickled = sorted(
        p.name for suffix in ("bin", "pt", "pth") for p in directory.glob(f"*.{suffix}")
    )
    if pickled:
        raise WeightLoadError(
            f"{directory} holds pickled weights only ({_listed(pickled)}), which are refused:"
            " reading a pickle runs code. If you trust them, convert them once:\n"
            f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})\n"
            f"  model.save_pretrained({str(directory)!r}, safe_serialization=True)"
        )
    raise WeightLoadError(f"{directory} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")


def _matched(
    slots: dict[str, WeightSlot], stored: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, WeightSlot]:
    """The slots to fill, after checking that they and the stored tensors are the same set."""
    for name, slot in list(slots.items()):
        if slot.absent and name not in stored:
            slots.pop(name)
            slot.absent()
        elif slot.pieces_only or (slot.pieces and name not in stored):
            slots.pop(name)
            for piece_name, piece in slot.pieces.items():
                if piece.absent and (piece_name in slots or piece_name not in stored):
                    piece.absent()  # Why: a layer's own slot, say of its bias, goes before a piece
                else:
                    slots[piece_name] = piece
    # Why: a tied checkpoint may hold the head too; it is the embedding once more.
    harmless = {"lm_head.weight"} if tied else set()
    unexpected = stored.keys() - slots.keys() - harmless
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
            + "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)
        )
    return slots


def _stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightLoadError(f"can't read {file}: {error}") from error


def _read(
    file: Path, names: Iterable[str], slots: Mapping[str, WeightSlot]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted parts of the named tensors, one at a time."""
    waiting = deque(names)
    while waiting:
        read_bytes = 0
        with safe_open(file, framework="pt", device="cpu") as opened:
            while waiting and read_bytes < MAPPED_BYTES:
                name = waiting.popleft()
                part = slots[name].part
                tensor = opened.get_slice(name)[part] if part else opened.get_tensor(name)
                read_bytes += tensor.nbytes
                yield name, tensor


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """(number of weights, bytes that they take here); a quantized weight counts as one."""
    parameters = list(model.parameters())
    methods = [module for module in model.modules() if isinstance(module, LinearMethod)]
    quantized = [method for method in methods if isinstance(method, QuantizedLinear)]
    return (
        sum(p.numel() for p in parameters) + sum(method.num_weights for method in quantized),
        sum(p.nbytes for p in parameters) + sum(b.nbytes for m in methods for b in m.buffers()),
    )


def _finish(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LinearMethod):
            module.finish()


def _listed(names: list[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
