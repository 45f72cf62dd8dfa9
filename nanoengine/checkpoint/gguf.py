"""A GGUF file: its header, and the rows of its tensors.

    "GGUF" | version | counts | keys and values | names, shapes, types, offsets | padding | tensors

A model is one file, or a set of parts; the first part has the keys. Little endian; versions 2 and
3, which have the same layout. Called by the checkpoint loaders; knows neither models nor names.
Everything that a file says is checked before it is used: a file may be truncated, or malicious.

Source: the specification, docs/gguf.md of ggml; type ids and block sizes: ggml.h and ggml-common.h
of ggml.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy
import torch

from nanoengine.errors import ConfigError, ModelError, UnsupportedModelError, WeightLoadError
from nanoengine.settings.checks import join_names, repr_short
from nanoengine.settings.files import GGUF, is_gguf, wrong_content

HEADER_BYTES = 128 << 20
"""Maximum size of a header. Why: a malformed file may claim any size; real headers have at most
some 50 MiB, with a vocabulary stored twice."""

MOST_ENTRIES = 1 << 16
"""Maximum number of keys, and of tensors: a large mixture of experts has some 2,000."""

MOST_STRINGS = 1 << 21
"""Maximum number of strings in a header: several times the largest vocabularies and their merges.
Why over all arrays: each string takes time and memory, however short it is."""

PART = re.compile(r"(?is)(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
"""The name of a part of a model; numbers start at 1."""

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"} | {
    7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
"""Type id of a value -> its NumPy dtype."""

STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")


class BlockType(NamedTuple):
    """Inputs and bytes of one block, the storage unit of a row."""

    inputs: int
    bytes: int


TYPES = {
    "F32": BlockType(1, 4), "F16": BlockType(1, 2), "BF16": BlockType(1, 2),
    "Q8_0": BlockType(32, 34), "Q4_0": BlockType(32, 18), "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22), "Q5_1": BlockType(32, 24), "Q2_K": BlockType(256, 84),
    "Q3_K": BlockType(256, 110), "Q4_K": BlockType(256, 144), "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210), "Q8_K": BlockType(256, 292), "IQ4_NL": BlockType(32, 18),
    "IQ4_XS": BlockType(256, 136), "MXFP4": BlockType(32, 17),
}  # fmt: skip
"""The supported tensor types, by ggml's names."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose rows are read as floats; all others are read as bytes."""

NAMES = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K",
    "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8",
    "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",
    "Q1_0",
)  # fmt: skip
"""ggml's name of each type id."""


class GGUFTensor(NamedTuple):
    """The location of a tensor.

    Attributes:
        shape: in torch's order, outputs first. Writers may omit leading dimensions of size 1.
        type: a key of `TYPES`.
        offset: of its first byte, from the start of the file.
    """

    file: Path
    shape: tuple[int, ...]
    type: str
    offset: int

    @property
    def num_rows(self) -> int:
        """Number of rows, over all leading dimensions."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        block = TYPES[self.type]
        return self.shape[-1] // block.inputs * block.bytes


class GGUFFile(NamedTuple):
    """The contents of the header, or of the headers of all parts.

    Attributes:
        metadata: by key: numbers, bool and str; arrays of strings are lists, arrays of numbers are
            NumPy arrays. A float32 is the float64 that it equals.
        tensors: by their names in the file, in file order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a file; for a part, of its whole set, with the first part's keys.

    Perf: 0.1 s for a vocabulary of 150,000 with 250,000 merges (one core).

    Raises:
        WeightLoadError: the file is damaged or inconsistent; the message has the position. Or parts
            are missing, or belong to another model.
        UnsupportedModelError: the version or the type of a tensor is not supported.
    """
    named = _read_file(path)
    parts = _parts(path, named.metadata)
    files = [named if part == path else _read_file(part) for part in parts]
    metadata, tensors = files[0].metadata, dict[str, GGUFTensor]()
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if (said := _whole(part, file.metadata, "split.no", 0)) != number:
            raise WeightLoadError(
                f"{part}: split.no is {said}, its name says {number}: the file was renamed, or is"
                " of another set"
            )
        for key, value in file.metadata.items() if number else ():
            first = repr_short(metadata.get(key, value))
            if key != "split.no" and first != repr_short(value):
                raise WeightLoadError(
                    f"{part}: {repr_short(key)} is {repr_short(value)}, in {parts[0].name}"
                    f" {first}: these are parts of two models"
                )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise WeightLoadError(
                    f"{part}: tensor {repr_short(name)} is in {tensors[name].file.name} too"
                )
            tensors[name] = tensor
    wanted = _whole(path, metadata, "split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise WeightLoadError(
            f"{path}: split.tensors.count is {wanted}, there are {len(tensors)} tensors: a part is"
            " of another model"
        )
    return GGUFFile(metadata, tensors)


def read_rows(tensor: GGUFTensor, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Reads rows `first` to `last` (exclusive; None: the end), with the leading dimensions
    flattened.

    Returns:
        [rows, row_bytes] uint8; or [rows, inputs] for a type of `FLOATS`. The tensor owns its
        memory.

    Raises:
        WeightLoadError: the file can't be read, or has become shorter.
    """
    last = tensor.num_rows if last is None else last
    assert 0 <= first <= last <= tensor.num_rows, (first, last, tensor)
    wanted, size = (last - first) * tensor.row_bytes, tensor.row_bytes
    try:
        # Why not mapped: pages of a mapped file are counted as this process's memory.
        read = numpy.fromfile(tensor.file, "u1", wanted, offset=tensor.offset + first * size)
    except OSError as error:
        raise WeightLoadError(f"can't read {tensor.file}: {error}") from error
    if len(read) != wanted:
        raise WeightLoadError(f"{tensor.file} has become shorter since its header was read")
    rows = torch.from_numpy(read).view(last - first, size)
    return rows.view(FLOATS[tensor.type]) if tensor.type in FLOATS else rows


class StoredRows:
    """Rows of blocks, [rows, row_bytes] uint8, which are read when they are sliced.

    Why: the largest matrix is a third of a small model, and would exist both as bytes and in packed
    form.
    """

    dtype = torch.uint8

    def __init__(self, tensor: GGUFTensor, first: int, last: int) -> None:
        self._tensor, self._first, self._last = tensor, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            return read_rows(self._tensor, self._first, self._last)[rows]
        start, stop, _ = rows.indices(len(self))
        return read_rows(self._tensor, self._first + start, self._first + stop)


def find_gguf(directory: Path) -> Path | None:
    """Finds the one GGUF model of a folder without safetensors; for a set, the part with the lowest
    number.

    Files with the suffix .gguf take precedence over files of any name, which some programs write.
    Files that belong to a model are skipped: projectors of images, adapters, importance matrices.

    Raises:
        ConfigError: there are several.
        WeightLoadError: there are several, and one is damaged.
    """
    if os.path.lexists(directory / "config.json") and any(directory.glob("*.safetensors*")):
        return None
    files = [path for path in sorted(directory.iterdir()) if is_gguf(path)]
    files = [path for path in files if path.suffix.lower() == GGUF] or files
    found: dict[str, Path] = {}
    for path in files:
        part = PART.fullmatch(path.name)
        found.setdefault(f"{part['stem']}-of-{part['count']}" if part else path.name, path)
    if len(found) > 1:
        models = {name: path for name, path in found.items() if _is_model(path)}
        if len(models) > 1:
            raise ConfigError(
                f"{directory} holds {len(models)} models: name the file of one of them:"
                f" {join_names([path.name for path in models.values()])}"
            )
        found = models or found
    return next(iter(found.values()), None)


def _is_model(path: Path) -> bool:
    """Whether a file's metadata say that it is a model: older projectors have no general.type."""
    keys = _read_file(path).metadata
    is_projector = keys.get("general.architecture") == "clip"
    return keys.get("general.type", "model") == "model" and not is_projector


def _parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The files of the set that `path` belongs to."""
    name, count = PART.fullmatch(path.name), _whole(path, metadata, "split.count", 1)
    stem, said = (name["stem"], int(name["count"])) if name else ("", 1)
    if said == 1 and count in (0, 1):  # Why 0: llama.cpp writes it after joining the parts.
        return [path]
    parts = [path.with_name(f"{stem}-{i + 1:05}-of-{said:05}{path.suffix}") for i in range(said)]
    if said != count or path not in parts:
        raise WeightLoadError(
            f"{path}: split.count is {count}, but the name is that of a file in {said}: the parts"
            " of a model are named NAME-00001-of-00003.gguf and so on"
        )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WeightLoadError(f"{path}: parts of this model are missing: {repr_short(missing)}")
    return parts


def _whole(path: Path, metadata: dict[str, Any], key: str, absent: int) -> int:
    """Reads a key that must be an integer."""
    if type(value := metadata.get(key, absent)) is not int:
        raise WeightLoadError(f"{path}: {key} is {repr_short(value)}; a whole number is allowed")
    return value


def _read_file(path: Path) -> GGUFFile:
    """Reads the header of one file."""
    try:
        # Why a regular file: reading a FIFO would block.
        if not path.is_file() or not (size := path.stat().st_size):
            raise WeightLoadError(f"{path} is no regular file, or it is empty")
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), min(size, HEADER_BYTES), access=mmap.ACCESS_READ) as data,
        ):
            return _Header(path, data, size).read()
    except OSError as error:
        raise WeightLoadError(f"can't read {path}: {error}") from error


class _Header:
    """A cursor in a header; every read checks that it stays inside the file.

    Attributes:
        data: the file's first bytes.
        size: bytes of the file.
        place: the next byte.
        what: what is being read, for messages.
        strings_left: how many more strings may be read.
    """

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.end, self.place, self.what = len(data), 0, "the header"
        self.strings_left = MOST_STRINGS

    def read(self) -> GGUFFile:
        """Reads the whole header."""
        if (magic := self.data[:4]) != b"GGUF":
            other = f"it starts with {magic!r}, not with b'GGUF': was it fetched?"
            self.refuse(wrong_content(self.path) or other)
        _, version, num_tensors, num_keys = self.unpack("<IIQQ")
        if version not in (2, 3):
            said = version if not version or version & 0xFFFF else f"{version:#x}, big endian"
            self.refuse(
                f"its version is {said}; versions 2 and 3, little endian, are read",
                UnsupportedModelError,
            )
        for count, kind in ((num_tensors, "tensors"), (num_keys, "keys")):
            if count > MOST_ENTRIES:
                self.refuse(f"it has {count} {kind}; at most {MOST_ENTRIES} are read")
        metadata: dict[str, Any] = {}
        for number in range(num_keys):
            self.what = f"key {number + 1} of {num_keys}"
            key = self.string()
            self.what = f"key {repr_short(key)}"
            if key in metadata or not key:
                self.refuse("there are two of it" if key else "it is empty")
            metadata[key] = self.value()
        found = [self.tensor(f"tensor {i + 1} of {num_tensors}") for i in range(num_tensors)]
        return GGUFFile(metadata, self.placed(found, metadata.get("general.alignment", 32)))

    def value(self) -> Any:
        """Reads a value after its type."""
        (kind,) = self.unpack("<I")
        if kind != ARRAY:
            return self.string() if kind == STRING else self.numbers(kind, 1)[0].item()
        kind, count = self.unpack("<IQ")
        return self.strings(count) if kind == STRING else self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> numpy.ndarray:
        """Reads numbers of one type."""
        if kind not in NUMBERS:
            self.refuse(f"{'an array of arrays' if kind == ARRAY else f'type {kind}'} is not read")
        dtype = numpy.dtype(NUMBERS[kind])
        raw = self.take(count * dtype.itemsize)
        if dtype.kind == "b" and raw.strip(b"\0\1"):
            self.refuse("a bool is neither 0 nor 1")
        return numpy.frombuffer(raw, dtype)

    def string(self) -> str:
        """Reads one string."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Reads strings, each after its length."""
        if count > self.strings_left:
            before = f", {MOST_STRINGS - self.strings_left} of them before" * (count != 1)
            self.refuse(f"it has {count} strings; at most {MOST_STRINGS} are read{before}")
        self.strings_left -= count
        data, place, end, found = self.data, self.place, self.end, []
        try:
            for _ in range(count):
                start = place + 8
                place = start + LENGTH.unpack_from(data, place)[0]
                if place > end:
                    break
                found.append(str(data[start:place], "utf-8"))
        except UnicodeDecodeError as error:
            self.place = start
            self.refuse(f"text {len(found)} is not UTF-8: {error.reason}")
        except struct.error:
            place = start
        if place > end:
            self.refuse(f"text {len(found)} ends at byte {place}, {self.beyond()}")
        self.place = place
        return found

    def tensor(self, what: str) -> tuple[int, str, GGUFTensor]:
        """Reads the position of a tensor's description, its name, and the tensor, with an offset
        relative to the tensor data."""
        self.what, place = what, self.place
        name = self.string()
        self.what = f"tensor {repr_short(name)}"
        (num_dims,) = self.unpack("<I")
        if not 1 <= num_dims <= 4:
            self.refuse(f"it has {num_dims} dimensions; 1 to 4 are read")
        *dims, number, offset = self.unpack(f"<{num_dims}QIQ")
        kind = NAMES[number] if number < len(NAMES) else f"number {number}"
        if kind not in TYPES:
            self.refuse(
                f"its type is {kind}; the types that are read are {', '.join(TYPES)}: quantize"
                " the model to one of these",
                UnsupportedModelError,
            )
        if 0 in dims or dims[0] % TYPES[kind].inputs:
            self.refuse(
                f"its shape is {dims[::-1]}; rows of {kind} are of blocks of"
                f" {TYPES[kind].inputs}, and no dimension is 0"
            )
        return place, name, GGUFTensor(self.path, tuple(dims[::-1]), kind, offset)

    def placed(
        self, found: list[tuple[int, str, GGUFTensor]], alignment: object
    ) -> dict[str, GGUFTensor]:
        """Checks that the tensors are inside the file and do not overlap, and makes offsets
        absolute."""
        self.what = "general.alignment"
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.refuse(f"it is {repr_short(alignment)}; a power of two is allowed")
        start = -(-self.place // alignment) * alignment
        free, tensors = 0, dict[str, GGUFTensor]()
        for place, name, tensor in sorted(found, key=lambda one: one[2].offset):
            self.what, self.place, offset = f"tensor {repr_short(name)}", place, tensor.offset
            if name in tensors:
                self.refuse("there are two of it")
            if offset < free or offset % alignment:
                self.refuse(
                    f"its offset is {offset}; {free} is free, and multiples of {alignment} are"
                    " allowed"
                )
            free = offset + tensor.num_rows * tensor.row_bytes
            if start + free > self.size:
                self.refuse(
                    f"it ends at byte {start + free}, but the file at {self.size}: is it complete?"
                )
            tensors[name] = tensor._replace(offset=start + offset)
        return tensors

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Reads numbers in a `struct` format."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        if count > self.end - self.place:
            self.refuse(f"it ends at byte {self.place + count}, {self.beyond()}")
        self.place += count
        return self.data[self.place - count : self.place]

    def beyond(self) -> str:
        """Why there are no more bytes."""
        if self.size > self.end:
            return f"but headers of at most {self.end} bytes are read"
        return f"but the file at {self.size}: is it complete?"

    def refuse(self, problem: str, error: type[ModelError] = WeightLoadError) -> NoReturn:
        """Raises the error, with the position."""
        raise error(f"{self.path}, byte {self.place}: {self.what}: {problem}")
