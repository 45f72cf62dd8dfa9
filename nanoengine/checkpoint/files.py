"""The weight files of a checkpoint: their names, headers and tensors.

This module reads safetensors; `gguf_tensors.py` reads GGUF files.

Tensors are read one at a time, and only the requested part of each. Pickled checkpoints are
rejected, because reading a pickle runs code. Called by `weights.py`, and by modules that need the
names or digests of the files, for which torch is not imported; knows neither models nor layers.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from safetensors import SafetensorError, safe_open

from nanoengine.errors import WeightLoadError
from nanoengine.settings.checks import check_value, join_names, quoted
from nanoengine.settings.files import is_gguf, read_object, unreadable

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAPPED_BYTES = 64 << 20
"""Bytes to read before a file is reopened. Why: pages of a mapped file count as this process's
memory while it is open, so a whole file would double the peak."""


class TensorInfo(NamedTuple):
    """The file of a tensor, its shape, and its dtype: in safetensors' notation, such as "BF16", or
    the GGUF type."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint by name, from the headers of its files.

    Raises:
        WeightLoadError: see `checkpoint_files`; a file is damaged; or a tensor is in two files.
    """
    if is_gguf(directory):
        from nanoengine.checkpoint.gguf_tensors import GGUFModel

        entries = GGUFModel(directory).entries()
        return {
            name: TensorInfo(entry.tensor.file, entry.shape, entry.tensor.type)
            for name, entry in entries.items()
        }
    found: dict[str, TensorInfo] = {}
    for file in checkpoint_files(directory):
        for name, tensor in _headers(file).items():
            if name in found:
                raise WeightLoadError(
                    f"{join_names([name])} is in two files, {found[name].file.name} and"
                    f" {file.name}: save the checkpoint again, with each tensor in one file"
                )
            found[name] = tensor
    return found


def checkpoint_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint.

    An index may name files in subdirectories, but not outside of the checkpoint, because it was
    downloaded. Files may be links to other directories, as in the hub's cache, because links were
    created on this machine.

    Raises:
        WeightLoadError: there are no files, a file of the index is missing or outside of the
            checkpoint, or the index is invalid.
    """
    if is_gguf(directory):
        from nanoengine.checkpoint.gguf_tensors import gguf_parts

        return gguf_parts(directory)
    index = directory / INDEX_NAME
    if os.path.lexists(index):
        where, raw = f"{index}: weight_map", read_object(index, WeightLoadError)
        weight_map = check_value(raw.get("weight_map"), dict, where, WeightLoadError)
        for tensor, name in weight_map.items():
            if not isinstance(name, str):  # Perf: a MoE has 20,000, at 7 us for `check_value`.
                check_value(name, str, f"{where}[{quoted(tensor)}]", WeightLoadError)
        names = sorted(set(weight_map.values()))
        paths = {name: PurePosixPath(name) for name in names}
        outside = [name for name, path in paths.items() if path.is_absolute() or ".." in path.parts]
        if outside:
            raise WeightLoadError(f"{index} names files outside its folder: {join_names(outside)}")
        # Why not Path.is_file: it raises for a name that is too long.
        if missing := [name for name in names if not os.path.isfile(directory / name)]:
            raise WeightLoadError(f"{index} names files that are missing: {join_names(missing)}")
        if not names:
            raise WeightLoadError(f"{index} names no files")
        return [directory / name for name in names]
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    from nanoengine.checkpoint.hints import files_without_index

    if found := files_without_index(directory):
        return found
    pickled = sorted(
        p.name for suffix in ("bin", "pt", "pth") for p in directory.glob(f"*.{suffix}")
    )
    if pickled:
        raise WeightLoadError(
            f"{directory} has only pickled weights ({join_names(pickled)}). They are not read,"
            " because reading a pickle runs code. If you trust them, convert them once:\n"
            f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})\n"
            f"  model.save_pretrained({str(directory)!r}, safe_serialization=True)"
        )
    raise WeightLoadError(f"{directory} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")


def file_digest(path: Path) -> bytes:
    """The xxh3 digest of all bytes of a file.

    Why all bytes: weight files with equal names, sizes, headers and times may have different
    weights, and equal files may have different times.

    Perf: 10 GiB/s from the page cache, where loading puts the file in any case (one Zen 5 core).
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


def read_tensors(
    file: Path, parts: Mapping[str, tuple[slice, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads tensors of one file, one at a time. `parts` has their names, and the slice to read; ()
    is the whole tensor.

    Raises:
        WeightLoadError: the file is damaged, or can't be read.
    """
    if is_gguf(file):
        from nanoengine.checkpoint.gguf_tensors import read_entries

        yield from read_entries(file, parts)
        return
    waiting = deque(parts)
    while waiting:
        read_bytes = 0
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                while waiting and read_bytes < MAPPED_BYTES:
                    name = waiting.popleft()
                    part = parts[name]
                    tensor = opened.get_slice(name)[part] if part else opened.get_tensor(name)
                    read_bytes += tensor.nbytes
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise unreadable(file, error, WeightLoadError) from error


def _headers(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(file, tuple(tensor.get_shape()), tensor.get_dtype())
                for name, tensor in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error, WeightLoadError) from error
