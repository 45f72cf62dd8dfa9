"""Weights: from safetensors files, or from a seed, into the slots that a model's layers offer.

Strict: every slot is filled by exactly one tensor of the right shape, and every tensor has a slot,
or nothing is loaded. Streaming: one tensor at a time, and of a sharded model only this rank's part.
Pickled checkpoints are refused, because reading a pickle runs code.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checks import MOST_SHOWN, check_value, shown
from nanoengine.errors import WeightLoadError
from nanoengine.json_file import read_object
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


class Stored(NamedTuple):
    """Where a tensor is, its shape, and its dtype as safetensors names it, such as "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, from the headers of its files.

    Raises:
        WeightLoadError: see `checkpoint_files`; a file is damaged; a tensor is in two files, of
            which either may be meant.
    """
    found: dict[str, Stored] = {}
    for file in checkpoint_files(directory):
        for name, tensor in _headers(file).items():
            if name in found:
                raise WeightLoadError(
                    f"{_listed([name])} is in two files, {found[name].file.name} and {file.name}:"
                    " write the checkpoint anew, each tensor once"
                )
            found[name] = tensor
    return found


def check_sizes(config: ModelConfig, stored: Mapping[str, Stored]) -> None:
    """Compares config.json with the tensors' shapes, before anything of its sizes is made.

    `load_weights` compares every shape; by then the model has been allocated.

    Raises:
        WeightLoadError: they contradict each other; names key, value, tensor and shape.
    """
    if config.num_hidden_layers > len(stored):
        raise WeightLoadError(
            f"config.json has num_hidden_layers={config.num_hidden_layers}, but the files hold"
            f" {len(stored)} tensors"
        )

    def check(key: str, size: int, axis: int, name: str) -> None:
        shape = stored[name].shape if name in stored else ()
        if len(shape) > axis and shape[axis] != size:
            raise WeightLoadError(f"config.json has {key}={size}, but {name} is {list(shape)}")

    def check_outputs(key: str, size: int, name: str) -> None:
        for part, axis in (("weight", 0), ("weight_scale", 0), ("scales", 1)):
            check(key, size, axis, f"{name}.{part}")

    check("vocab_size", config.vocab_size, 0, "model.embed_tokens.weight")
    check("hidden_size", config.hidden_size, 1, "model.embed_tokens.weight")
    for key, heads, part in (
        ("num_attention_heads", config.num_attention_heads, "q_proj"),
        ("num_key_value_heads", config.num_key_value_heads, "k_proj"),
    ):
        name = f"model.layers.0.self_attn.{part}"
        check_outputs(f"{key} * head_dim", heads * config.head_dim, name)
    sparse = config.moe.layers if config.moe else ()
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        if config.moe is None or layer not in sparse:
            check_outputs("intermediate_size", config.intermediate_size, f"{mlp}.gate_proj")
            continue
        size = config.moe.intermediate_size
        check("num_experts", config.moe.num_experts, 0, f"{mlp}.gate.weight")
        check("moe_intermediate_size", size, 2, f"{mlp}.experts.down_proj")
        check_outputs("moe_intermediate_size", size, f"{mlp}.experts.0.gate_proj")


def load_weights(model: CausalLM, stored: Mapping[str, Stored]) -> None:
    """Fills the model from the stored tensors, each slot by exactly one.

    float32, float16, bfloat16 and float64 tensors are converted to the model's dtype. Peak memory
    is the model's own plus one tensor and `MAPPED_BYTES`.

    Raises:
        WeightLoadError: names or shapes don't match the model, which the message names, or a file
            can't be read.
    """
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    slots = _matched(weight_slots(model), shapes, tied=model.lm_head.tied)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in stored:
        if name in slots:
            by_file[stored[name].file].append(name)
    waiting = set(slots)
    for file, names in by_file.items():
        for name, tensor in _read(file, names, slots):
            allowed = slots[name].dtypes
            if tensor.dtype not in allowed if allowed else not tensor.is_floating_point():
                kind = " or ".join(map(str, allowed)) or "floating point"
                raise WeightLoadError(f"{name} in {file} is {tensor.dtype}, not {kind}")
            waiting.remove(name)  # Why: a method may have packed a slot that was filled
            with torch.no_grad():
                slots[name].store(tensor)
    assert not waiting, waiting
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
            own = module.weight_slots(path)
            assert not slots.keys() & own.keys(), f"{path} offers slots of another layer"
            slots.update(own)
    return slots


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    An index may name files in directories below, and files may be links to anywhere, as they are in
    the hub's cache: links were made on this machine, an index came with the weights.

    Raises:
        WeightLoadError: there are none, one that the index names is missing or outside of the
            checkpoint, or the index is no index.
    """
    index = directory / INDEX_NAME
    if os.path.lexists(index):
        where, raw = f"{index}: weight_map", read_object(index, WeightLoadError)
        weight_map = check_value(raw.get("weight_map"), dict, where, WeightLoadError)
        for tensor, name in weight_map.items():
            if not isinstance(name, str):  # Perf: a MoE has 20,000, at 7 us for `check_value`.
                check_value(name, str, f"{where}[{shown(tensor)}]", WeightLoadError)
        names = sorted(set(weight_map.values()))
        paths = {name: PurePosixPath(name) for name in names}
        outside = [name for name, path in paths.items() if path.is_absolute() or ".." in path.parts]
        if outside:
            raise WeightLoadError(f"{index} names files outside of it: {_listed(outside)}")
        # Why not Path.is_file: it raises for a name that is too long.
        if missing := [name for name in names if not os.path.isfile(directory / name)]:
            raise WeightLoadError(f"{index} names files that are missing: {_listed(missing)}")
        if not names:
            raise WeightLoadError(f"{index} names no files")
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


def _headers(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(file, tuple(one.get_shape()), one.get_dtype())
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise WeightLoadError(f"can't read {file}: {error}") from error


def _read(
    file: Path, names: Iterable[str], slots: Mapping[str, WeightSlot]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted parts of the named tensors, one at a time."""
    waiting = deque(names)
    while waiting:
        read_bytes = 0
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                while waiting and read_bytes < MAPPED_BYTES:
                    name = waiting.popleft()
                    part = slots[name].part
                    tensor = opened.get_slice(name)[part] if part else opened.get_tensor(name)
                    read_bytes += tensor.nbytes
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise WeightLoadError(f"can't read {file}: {error}") from error


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
    cut = [n if len(n) <= MOST_SHOWN else f"{n[:MOST_SHOWN]}..." for n in names[:MOST_NAMES]]
    return ", ".join(cut) + (f" and {rest} more" if rest > 0 else "")
