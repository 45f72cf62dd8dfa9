"""Reads GGUF files: the header, and rows of tensors.

    "GGUF" | version | counts | keys and values | names, shapes, types, offsets | padding | tensors

A model is one file, or a set of parts whose first part has the keys. Supported are little endian
files of versions 2 and 3, which have the same layout. All contents are checked before they are
used, because a file may be truncated or malicious. Called by the checkpoint loaders; knows neither
models nor tensor names.

Source: the specification, docs/gguf.md of ggml; type ids and block sizes: ggml.h and ggml-common.h
of ggml.
"""

from __future__ import annotations

import functools
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
from nanoengine.settings.checks import join_names, quoted
from nanoengine.settings.files import GGUF, is_gguf, wrong_content

HEADER_BYTES = 128 << 20
"""Maximum size of a header. Why: a malformed file may claim any size. Real headers have at most
about 50 MiB, with a vocabulary stored twice."""

MAX_ENTRIES = 1 << 16
"""Maximum number of keys, and of tensors. A large mixture of experts has about 2,000 tensors."""

MAX_STRINGS = 1 << 21
"""Maximum number of strings in a header: several times the largest vocabularies and their merges.
Why a total over all arrays: even an empty string takes time and memory."""

PART = re.compile(r"(?is)(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
"""The file name of a part of a model; numbers start at 1."""

VALUE_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"} | {
    7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
"""Type id of a value -> its NumPy dtype."""

STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")


class BlockType(NamedTuple):
    """Number of inputs and bytes of a block; a row consists of blocks."""

    inputs: int
    bytes: int


TYPES = {
    "F32": BlockType(1, 4), "F16": BlockType(1, 2), "BF16": BlockType(1, 2),
    "Q8_0": BlockType(32, 34), "Q4_0": BlockType(32, 18), "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22), "Q5_1": BlockType(32, 24), "Q2_K": BlockType(256, 84),
    "Q3_K": BlockType(256, 110), "Q4_K": BlockType(256, 144), "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210), "Q8_K": BlockType(256, 292), "IQ4_NL": BlockType(32, 18),
    "IQ4_XS": BlockType(256, 136), "MXFP4": BlockType(32, 17), "IQ1_S": BlockType(256, 50),
    "IQ1_M": BlockType(256, 56), "IQ2_XXS": BlockType(256, 66), "IQ2_XS": BlockType(256, 74),
    "IQ2_S": BlockType(256, 82), "IQ3_XXS": BlockType(256, 98), "IQ3_S": BlockType(256, 110),
    "NVFP4": BlockType(64, 36),
}  # fmt: skip
"""The supported tensor types, by ggml's names."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose rows are read as floats. Rows of the other types are read as bytes."""

TYPE_NAMES = (
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
        offset: position of its first byte in the file.
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
            NumPy arrays. A float32 becomes the float of the same value.
        tensors: by their names in the file, in file order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path, *, keep: bool = True) -> GGUFFile:
    """Reads the header of a file. If the file is a part of a set, reads the headers of all parts;
    the metadata are the first part's. A start needs them four times, so with `keep` they are kept
    for the next call, unless the file changes.

    Perf: 0.1 s for a vocabulary of 150,000 with 250,000 merges (one core).

    Raises:
        WeightLoadError: the file is damaged or inconsistent, with the position in the message; or
            parts are missing or belong to another model.
        UnsupportedModelError: the version or the type of a tensor is not supported.
    """
    state = path.exists() and (path.stat().st_size, path.stat().st_mtime_ns)
    found = GGUFFile(*map(dict, _read_parts(path, state)))
    if not keep:
        _read_parts.cache_clear()
    return found


@functools.lru_cache(maxsize=1)
def _read_parts(path: Path, state: object) -> GGUFFile:
    """See `read_gguf`; `state` changes with the file."""
    requested = _read_file(path)
    parts = _parts(path, requested.metadata)
    files = [requested if part == path else _read_file(part) for part in parts]
    metadata, tensors = files[0].metadata, dict[str, GGUFTensor]()
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if (index := _read_int(part, file.metadata, "split.no", 0)) != number:
            raise WeightLoadError(
                f"{part}: split.no is {index}, but the file name gives {number}: the file was"
                " renamed, or belongs to another model"
            )
        for key, value in file.metadata.items() if number else ():
            first = quoted(metadata.get(key, value))
            if key != "split.no" and first != quoted(value):
                raise WeightLoadError(
                    f"{part}: {quoted(key)} is {quoted(value)}, but {first} in"
                    f" {parts[0].name}: the files are parts of two models"
                )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise WeightLoadError(
                    f"{part}: tensor {quoted(name)} is also in {tensors[name].file.name}"
                )
            tensors[name] = tensor
    expected = _read_int(path, metadata, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise WeightLoadError(
            f"{path}: split.tensors.count is {expected}, but the parts have {len(tensors)} tensors:"
            " a part belongs to another model"
        )
    return GGUFFile(metadata, tensors)


def read_rows(tensor: GGUFTensor, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Reads the rows from `first` to `last` (exclusive; None: to the end). Rows are numbered over
    all leading dimensions.

    Returns:
        [rows, row_bytes] uint8; or [rows, inputs] for a type of `FLOATS`. The tensor owns its
        memory.

    Raises:
        WeightLoadError: the file can't be read, or was truncated since its header was read.
    """
    last = tensor.num_rows if last is None else last
    assert 0 <= first <= last <= tensor.num_rows, (first, last, tensor)
    count, size = (last - first) * tensor.row_bytes, tensor.row_bytes
    try:
        # Why not mapped: pages of a mapped file are counted as this process's memory.
        read = numpy.fromfile(tensor.file, "u1", count, offset=tensor.offset + first * size)
    except OSError as error:
        raise WeightLoadError(f"can't read {tensor.file}: {error}") from error
    if len(read) != count:
        raise WeightLoadError(f"{tensor.file} was truncated since its header was read")
    rows = torch.from_numpy(read).view(last - first, size)
    return rows.view(FLOATS[tensor.type]) if tensor.type in FLOATS else rows


class StoredRows:
    """Rows of a quantized tensor, [rows, row_bytes] uint8, which are read when they are sliced.

    Why: the largest matrix is a third of a small model, and would be in memory twice, as bytes and
    in packed form.
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
    """Finds the GGUF model of a folder without safetensors; if it has several parts, the part with
    the lowest number.

    Files with the suffix .gguf take precedence over GGUF files with other names, which some
    programs write. Files that are not models are skipped: image projectors, adapters, importance
    matrices.

    Raises:
        ConfigError: there are several models.
        WeightLoadError: there are several GGUF files, and one is damaged.
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
                f"{directory} has {len(models)} models; give the path of one file instead:"
                f" {join_names([path.name for path in models.values()])}"
            )
        found = models or found
    return next(iter(found.values()), None)


def _is_model(path: Path) -> bool:
    """Whether the metadata describe a model. Older image projectors have no general.type."""
    keys = _read_file(path).metadata
    is_projector = keys.get("general.architecture") == "clip"
    return keys.get("general.type", "model") == "model" and not is_projector


def _parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The files of the set that `path` belongs to."""
    name, count = PART.fullmatch(path.name), _read_int(path, metadata, "split.count", 1)
    stem, total = (name["stem"], int(name["count"])) if name else ("", 1)
    if total == 1 and count in (0, 1):  # Why 0: llama.cpp writes it after joining the parts.
        return [path]
    parts = [path.with_name(f"{stem}-{i + 1:05}-of-{total:05}{path.suffix}") for i in range(total)]
    if total != count or path not in parts:
        raise WeightLoadError(
            f"{path}: split.count is {count}, but the file name gives {total}; parts must be named"
            " NAME-00001-of-00003.gguf and so on"
        )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WeightLoadError(f"{path}: parts of this model are missing: {quoted(missing)}")
    return parts


def _read_int(path: Path, metadata: dict[str, Any], key: str, absent: int) -> int:
    """Reads a key that must be an integer."""
    if type(value := metadata.get(key, absent)) is not int:
        raise WeightLoadError(f"{path}: {key} must be an integer, got {quoted(value)}")
    return value


def _read_file(path: Path) -> GGUFFile:
    """Reads the header of one file."""
    try:
        # Why a regular file: reading a FIFO would block.
        if not path.is_file() or not (size := path.stat().st_size):
            raise WeightLoadError(f"{path} is not a regular file, or it is empty")
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), min(size, HEADER_BYTES), access=mmap.ACCESS_READ) as data,
        ):
            return _Header(path, data, size).read()
    except OSError as error:
        raise WeightLoadError(f"can't read {path}: {error}") from error


class _Header:
    """Reads a header from the current position, and checks that reads stay inside the file.

    Attributes:
        data: the first bytes of the file.
        size: size of the file [bytes].
        pos: position of the next byte.
        what: the part of the header that is being read, for messages.
        strings_left: how many more strings may be read.
    """

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.end, self.pos, self.what = len(data), 0, "the header"
        self.strings_left = MAX_STRINGS

    def read(self) -> GGUFFile:
        """Reads the whole header."""
        if (magic := self.data[:4]) != b"GGUF":
            hint = f"it starts with {magic!r} instead of b'GGUF'; is the download complete?"
            self.fail(wrong_content(self.path) or hint)
        _, version, num_tensors, num_keys = self.unpack("<IIQQ")
        if version not in (2, 3):
            shown = version if not version or version & 0xFFFF else f"{version:#x}, big endian"
            self.fail(
                f"its version is {shown}; supported: versions 2 and 3, little endian",
                UnsupportedModelError,
            )
        for count, kind in ((num_tensors, "tensors"), (num_keys, "keys")):
            if count > MAX_ENTRIES:
                self.fail(f"it has {count} {kind}; the maximum is {MAX_ENTRIES}")
        metadata: dict[str, Any] = {}
        for number in range(num_keys):
            self.what = f"key {number + 1} of {num_keys}"
            key = self.string()
            self.what = f"key {quoted(key)}"
            if key in metadata or not key:
                self.fail("the key occurs twice" if key else "the key is empty")
            metadata[key] = self.value()
        found = [self.tensor(f"tensor {i + 1} of {num_tensors}") for i in range(num_tensors)]
        return GGUFFile(metadata, self.locate_tensors(found, metadata.get("general.alignment", 32)))

    def value(self) -> Any:
        """Reads a type and a value of this type."""
        (kind,) = self.unpack("<I")
        if kind != ARRAY:
            return self.string() if kind == STRING else self.array(kind, 1)[0].item()
        kind, count = self.unpack("<IQ")
        return self.strings(count) if kind == STRING else self.array(kind, count)

    def array(self, kind: int, count: int) -> numpy.ndarray:
        """Reads an array of numbers of one type."""
        if kind not in VALUE_DTYPES:
            what = "an array of arrays" if kind == ARRAY else f"type {kind}"
            self.fail(f"{what} is not supported")
        dtype = numpy.dtype(VALUE_DTYPES[kind])
        raw = self.read_bytes(count * dtype.itemsize)
        if dtype.kind == "b" and raw.strip(b"\0\1"):
            self.fail("a bool must be 0 or 1")
        return numpy.frombuffer(raw, dtype)

    def string(self) -> str:
        """Reads one string."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Reads strings, each of which follows its length."""
        if count > self.strings_left:
            total = MAX_STRINGS - self.strings_left + count
            self.fail(f"with its {count} strings, there are {total}; the maximum is {MAX_STRINGS}")
        self.strings_left -= count
        data, pos, end, found = self.data, self.pos, self.end, []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + LENGTH.unpack_from(data, pos)[0]
                if pos > end:
                    break
                found.append(str(data[start:pos], "utf-8"))
        except UnicodeDecodeError as error:
            self.pos = start
            self.fail(f"string {len(found)} is not UTF-8: {error.reason}")
        except struct.error:
            pos = start
        if pos > end:
            self.fail(f"string {len(found)} ends at byte {pos}, {self.past_end()}")
        self.pos = pos
        return found

    def tensor(self, what: str) -> tuple[int, str, GGUFTensor]:
        """Reads the description of a tensor. Returns its position, the name, and the tensor, whose
        offset is relative to the start of the tensor data."""
        self.what, pos = what, self.pos
        name = self.string()
        self.what = f"tensor {quoted(name)}"
        (num_dims,) = self.unpack("<I")
        if not 1 <= num_dims <= 4:
            self.fail(f"it has {num_dims} dimensions; supported: 1 to 4")
        *dims, number, offset = self.unpack(f"<{num_dims}QIQ")
        kind = TYPE_NAMES[number] if number < len(TYPE_NAMES) else f"number {number}"
        if kind not in TYPES:
            self.fail(
                f"its type is {kind}; supported types: {', '.join(TYPES)}. Quantize the model to"
                " one of these",
                UnsupportedModelError,
            )
        if 0 in dims or dims[0] % TYPES[kind].inputs:
            self.fail(
                f"its shape is {dims[::-1]}; rows of {kind} must be multiples of"
                f" {TYPES[kind].inputs}, and no dimension may be 0"
            )
        return pos, name, GGUFTensor(self.path, tuple(dims[::-1]), kind, offset)

    def locate_tensors(
        self, found: list[tuple[int, str, GGUFTensor]], alignment: object
    ) -> dict[str, GGUFTensor]:
        """Checks that the tensors are inside the file and do not overlap, and makes offsets
        absolute."""
        self.what = "general.alignment"
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"it must be a power of two, got {quoted(alignment)}")
        start = -(-self.pos // alignment) * alignment
        free, tensors = 0, dict[str, GGUFTensor]()
        for pos, name, tensor in sorted(found, key=lambda item: item[2].offset):
            self.what, self.pos, offset = f"tensor {quoted(name)}", pos, tensor.offset
            if name in tensors:
                self.fail("the name occurs twice")
            if offset < free or offset % alignment:
                self.fail(
                    f"its offset is {offset}; it must be a multiple of {alignment}, at least {free}"
                )
            free = offset + tensor.num_rows * tensor.row_bytes
            if start + free > self.size:
                self.fail(
                    f"it ends at byte {start + free}, but the file has {self.size}; is it complete?"
                )
            tensors[name] = tensor._replace(offset=start + offset)
        return tensors

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Reads numbers in a format of `struct`."""
        return struct.unpack(layout, self.read_bytes(struct.calcsize(layout)))

    def read_bytes(self, count: int) -> bytes:
        """Returns the next bytes."""
        if count > self.end - self.pos:
            self.fail(f"it ends at byte {self.pos + count}, {self.past_end()}")
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def past_end(self) -> str:
        """The part of a message that says why there are no more bytes."""
        if self.size > self.end:
            return f"but headers may have at most {self.end} bytes"
        return f"but the file has {self.size}; is it complete?"

    def fail(self, problem: str, error: type[ModelError] = WeightLoadError) -> NoReturn:
        """Raises an error with the file, the position and what is being read."""
        raise error(f"{self.path}, byte {self.pos}: {self.what}: {problem}")
