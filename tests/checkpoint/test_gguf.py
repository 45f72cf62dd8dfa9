"""GGUF files: valid files, compared with the `gguf` package; and rejected invalid files."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType

from nanoengine.checkpoint.gguf import TYPE_NAMES, TYPES, find_gguf, read_gguf, read_rows
from nanoengine.errors import ConfigError, ModelError, UnsupportedModelError, WeightLoadError

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str | bytes, dims: list[int], kind: str | int = "F32", offset: int = 0) -> bytes:
    number = TYPE_NAMES.index(kind) if isinstance(kind, str) else kind
    form = f"<I{len(dims)}QIQ"
    return text(name) + struct.pack(form, len(dims), *dims, number, offset)


ALIGNED = key("general.alignment", U32, struct.pack("<I", 32))


def build(
    keys: list[bytes] = [ALIGNED],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: int = 0,
    counts: tuple[int, int] | None = None,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
) -> bytes:
    """The bytes of a file whose parts may contradict each other."""
    counts = counts or (len(tensors), len(keys))
    header = b"".join((start, struct.pack("<QQ", *counts), *keys, *tensors))
    return header + bytes(-len(header) % 32 + data)


def valid() -> bytes:
    """The bytes of a small valid file with one of each element."""
    keys = [
        ALIGNED,
        key("general.architecture", STRING, text("llama")),
        key("flag", BOOL, b"\1"),
        key("eps", F32, struct.pack("<f", 1e-6)),
        key("tokens", ARRAY, array(STRING, 3, text("a") + text("é") + text(""))),
        key("flags", ARRAY, array(BOOL, 2, b"\0\1")),
        key("scores", ARRAY, array(F32, 2, struct.pack("<2f", 1, 2))),
    ]
    tensors = [tensor("a", [8, 2]), tensor("b", [32, 2], "Q4_0", 64), tensor("c", [3], "BF16", 128)]
    return build(keys, tensors, data=134)


def write(folder: Path, raw: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


def write_with_package(path: Path, **options: int) -> Path:
    """Writes a file with the package, with one tensor per type that it can quantize."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_uint64("large", 1 << 63)
    writer.add_int32("negative", -5)
    writer.add_bool("flag", True)
    writer.add_array("flags", [True, False, True])
    writer.add_array("numbers", [3, -4])
    writer.add_array("tokenizer.ggml.tokens", [f"töken {i}" for i in range(300)])
    numbers = numpy.random.default_rng(1)
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        kind = GGMLQuantizationType[name]
        rows = gguf.quants.quantize(numbers.standard_normal((2, 3, 64), dtype="f4"), kind)
        writer.add_tensor(f"weight.{name}", rows, raw_dtype=kind)
    writer.add_tensor("norm", numbers.standard_normal(5, dtype="f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_read_as_the_package_reads_it(tmp_path):
    path = write_with_package(tmp_path / "model.gguf")
    found, expected = read_gguf(path), gguf.GGUFReader(path)
    for name, field in expected.fields.items():
        if not name.startswith("GGUF."):
            value = found.metadata.pop(name)
            assert (value.tolist() if hasattr(value, "tolist") else value) == field.contents()
    assert found.metadata == {}
    assert [one.name for one in expected.tensors] == list(found.tensors)
    for one in expected.tensors:
        read = found.tensors[one.name]
        assert read.shape == tuple(reversed(one.shape.tolist()))
        assert (read.type, read.offset) == (one.tensor_type.name, one.data_offset)
        raw = torch.from_numpy(one.data.copy().view("u1")).view(read.num_rows, -1)
        rows = read_rows(read)
        assert torch.equal(rows.view(torch.uint8), raw)
        half = read.num_rows // 2
        assert torch.equal(read_rows(read, half), rows[half:])
        assert torch.equal(read_rows(read, half // 2, half), rows[half // 2 : half])
    assert read_rows(found.tensors["weight.BF16"]).dtype == torch.bfloat16
    assert read_rows(found.tensors["weight.F16"]).shape == (6, 64)
    assert read_rows(found.tensors["weight.Q4_0"]).shape == (6, 36)


def test_block_sizes_equal_the_sizes_of_the_package():
    for name, block in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] == block
    for kind in GGMLQuantizationType:
        assert TYPE_NAMES[kind] == kind.name


def test_version_2_is_read_as_version_3(tmp_path):
    found = read_gguf(write(tmp_path, valid()))
    assert found.metadata["tokens"] == ["a", "é", ""]
    second = write(tmp_path, valid().replace(struct.pack("<I", 3), struct.pack("<I", 2), 1))
    assert read_gguf(second).tensors == found.tensors


HUGE = (1, 1 << 31, 1 << 62, (1 << 64) - 1)
INVALID = {
    "magic": (build(start=b"GGML" + struct.pack("<I", 3)), "it starts with b'GGML' instead of"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1", "run `git lfs pull` in its folder"),
    "version 1": (build(start=b"GGUF" + struct.pack("<I", 1)), "version is 1;"),
    "version 4": (build(start=b"GGUF" + struct.pack("<I", 4)), "version is 4;"),
    "version 0": (build(start=b"GGUF" + struct.pack("<I", 0)), "version is 0;"),
    "big endian": (build(start=b"GGUF" + struct.pack(">I", 3)), "big endian; .* little endian"),
    "alignment 0": (
        build([key("general.alignment", U32, bytes(4))]),
        "general.alignment: it must be a power of two, got 0",
    ),
    "alignment 48": (
        build([key("general.alignment", U32, struct.pack("<I", 48))]),
        "it must be a power of two, got 48",
    ),
    "alignment huge": (
        build(
            [key("general.alignment", U64, struct.pack("<Q", 1 << 63))], [tensor("a", [8])], data=32
        ),
        "tensor 'a': it ends at byte",
    ),
    "alignment text": (
        build([key("general.alignment", STRING, text("32"))]),
        "general.alignment: it must be a power of two, got '32'",
    ),
    "two keys": (build([ALIGNED, ALIGNED]), "key 'general.alignment': the key occurs twice"),
    "empty key": (build([key("", U32, bytes(4))]), "key '': the key is empty"),
    "key not UTF-8": (build([key(b"a\xff", U32, bytes(4))]), "key 1 of 1: string 0 is not UTF-8"),
    "value not UTF-8": (
        build([key("a", ARRAY, array(STRING, 2, text("b") + text(b"\xc3(")))]),
        "key 'a': string 1 is not UTF-8",
    ),
    "bool of 2": (build([key("a", BOOL, b"\2")]), "key 'a': a bool must be 0 or 1"),
    "bools of 2": (build([key("a", ARRAY, array(BOOL, 3, b"\0\2\1"))]), "a bool must be"),
    "kind 13": (build([key("a", 13, bytes(8))]), "key 'a': type 13 is"),
    "kinds 13": (build([key("a", ARRAY, array(13, 1, bytes(8)))]), "key 'a': type 13 is"),
    "array of arrays": (
        build([key("a", ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4))))]),
        "key 'a': an array of arrays is",
    ),
    "nested 10,000 times": (
        build([key("a", ARRAY, array(ARRAY, 1) * 10_000)]),
        "key 'a': an array of arrays is",
    ),
    "5 dimensions": (build([], [tensor("a", [1] * 5)], 32), "tensor 'a': it has 5 dimensions"),
    "no dimension": (build([], [tensor("a", [])], 32), "tensor 'a': it has 0 dimensions"),
    "dimension 0": (build([], [tensor("a", [8, 0])], 32), r"tensor 'a': its shape is \[0, 8\]"),
    "product overflows": (
        build([], [tensor("a", [1 << 32, 1 << 32, 1 << 32])], 32),
        "tensor 'a': it ends at byte",
    ),
    "product is 2 ** 64": (
        build([], [tensor("a", [1 << 32, 1 << 30])], 32),
        "tensor 'a': it ends at byte",
    ),
    "row with a partial block": (
        build([], [tensor("a", [48, 2], "Q4_0")], 64),
        r"tensor 'a': its shape is \[2, 48\]; rows of Q4_0 must be multiples of 32",
    ),
    "type not supported": (
        build([], [tensor("a", [256], "TQ1_0")], 256),
        "tensor 'a': its type is TQ1_0; supported types: F32, F16, .*MXFP4",
    ),
    "type unknown": (
        build([], [tensor("a", [256], 4000)], 256),
        "tensor 'a': its type is number 4000",
    ),
    "type integers": (build([], [tensor("a", [256], "I8")], 256), "its type is I8"),
    "tensor outside": (
        build([], [tensor("a", [8, 4], offset=64)], 128),
        "tensor 'a': it ends at byte 288, but the file has 224",
    ),
    "offset 2 ** 63": (build([], [tensor("a", [8], offset=1 << 63)], 32), "tensor 'a': it ends at"),
    "offset unaligned": (build([], [tensor("a", [1], offset=4)], 32), "its offset is 4;"),
    "tensors overlap": (
        build([], [tensor("a", [16]), tensor("b", [8], offset=32)], 64),
        "tensor 'b': its offset is 32; it must be a .* at least 64",
    ),
    "tensors at one offset": (
        build([], [tensor("a", [8]), tensor("b", [8])], 64),
        "tensor 'b': its offset is 0; it must be a .* at least 32",
    ),
    "two tensors": (
        build([], [tensor("a", [8]), tensor("a", [8], offset=32)], 64),
        "tensor 'a': the name occurs twice",
    ),
    **{f"{n} more tensors": (build(counts=(n, 1)), r"tensors|tensor 1 of 1") for n in HUGE},
    **{f"{n} more keys": (build(counts=(0, 1 + n)), r"keys|key 2 of 2") for n in HUGE[:3]},
    **{
        f"string of {n}": (build([key("a", STRING, struct.pack("<Q", n))]), "'a': string 0 ends at")
        for n in HUGE[1:]
    },
    **{
        f"key of {n}": (build([struct.pack("<Q", n)]), "key 1 of 1: string 0 ends at")
        for n in HUGE[1:]
    },
    **{
        f"{n} numbers": (build([key("a", ARRAY, array(U64, n))]), "key 'a': it ends at byte")
        for n in HUGE[1:]
    },
    **{
        f"{n} strings": (build([key("a", ARRAY, array(STRING, n))]), "the maximum is 2097152")
        for n in HUGE[1:]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_header_is_rejected_with_its_position(tmp_path, case):
    raw, message = INVALID[case]
    path = write(tmp_path, raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"model\.gguf, byte \d+: .*{message}") as error:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    unsupported = "version" in case or "type " in case or case == "big endian"
    assert error.type is (UnsupportedModelError if unsupported else WeightLoadError)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([key("a", ARRAY, array(STRING, 1 << 27))], "134217728 strings"),
        ([key("a", STRING, struct.pack("<Q", 1 << 29))], "headers may have at most"),
        ([key("a", ARRAY, array(U64, 1 << 27))], "headers may have at most"),
        ([key("a", ARRAY, array(STRING, 1000, text(bytes(200))))], "key '.*': the key is empty"),
    ],
)
def test_a_header_of_a_large_file_has_limits(tmp_path, keys, message):
    path = write(tmp_path, build(keys, counts=(0, 3)))
    with open(path, "r+b") as file:
        file.truncate(1 << 34)  # zeros that use no disk space
    tracemalloc.start()
    try:
        with pytest.raises(WeightLoadError, match=message):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def read_all(path: Path) -> None:
    for one in read_gguf(path).tensors.values():
        assert read_rows(one).numel() > 0


def test_a_file_truncated_at_any_byte_is_rejected(tmp_path):
    complete = valid()
    read_all(write(tmp_path, complete))
    path = tmp_path / "model.gguf"
    for length in reversed(range(len(complete))):
        with open(path, "r+b") as file:
            file.truncate(length)
        with pytest.raises(WeightLoadError, match=r"complete|empty|instead of b'GGUF'"):
            read_all(path)


def test_a_file_with_changed_bytes_is_read_or_rejected(tmp_path):
    """Rejected with an error of this package; nothing else is raised."""
    complete, generator, rejected = valid(), random.Random(7), 0
    header = len(complete) - 134
    for _ in range(2000):
        raw = bytearray(complete)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            at = generator.randrange(header)
            raw[at] = generator.choice(
                (generator.randrange(256), raw[at] ^ 1 << generator.randrange(8))
            )
        if generator.random() < 0.1:
            start, length = generator.randrange(header), generator.randrange(1, 20)
            raw[start : start + length] = raw[start : start + generator.randrange(20)]
        try:
            read_all(write(tmp_path, bytes(raw)))
        except ModelError:
            rejected += 1
    assert 1000 < rejected < 2000


def test_a_path_that_is_not_a_regular_file_is_rejected(tmp_path):
    with pytest.raises(WeightLoadError, match="not a regular file"):
        read_gguf(tmp_path)
    with pytest.raises(WeightLoadError, match="not a regular file"):
        read_gguf(tmp_path / "absent.gguf")


def test_a_file_that_is_truncated_after_its_header_was_read_is_rejected(tmp_path):
    path = write(tmp_path, valid())
    found = read_gguf(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(WeightLoadError, match="was truncated"):
        read_rows(found.tensors["c"])
    path.unlink()
    with pytest.raises(WeightLoadError, match="can't read"):
        read_rows(found.tensors["c"])


def split(folder: Path, name: str = "model") -> list[Path]:
    """The files of a model that the package split."""
    write_with_package(folder / f"{name}.gguf", split_max_tensors=4)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_a_model_in_parts_equals_the_model_in_one_file(tmp_path):
    parts = split(tmp_path)
    whole = read_gguf(write_with_package(tmp_path / "whole.gguf"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        found = read_gguf(part)
        assert found.metadata["split.count"] == 3
        assert whole.metadata.keys() == {k for k in found.metadata if not k.startswith("split.")}
        assert found.tensors.keys() == whole.tensors.keys()
        for name, one in found.tensors.items():
            assert torch.equal(read_rows(one), read_rows(whole.tensors[name]))


def part(number: int, count: int, *keys: bytes, total: int = 2, name: str = "") -> bytes:
    """One file of a split model, with one tensor."""
    numbers = {"split.no": number, "split.count": count, "split.tensors.count": total}
    keys_of_part = [key(name, U32, struct.pack("<I", value)) for name, value in numbers.items()]
    return build([*keys_of_part, *keys], [tensor(name or f"tensor {number}", [8])], 32)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_whose_parts_were_joined_is_read(tmp_path, count):
    path = write(tmp_path, part(0, count, total=1))
    assert list(read_gguf(path).tensors) == ["tensor 0"]


FIRST, SECOND = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({FIRST: part(0, 2)}, "parts of this model are missing.*m-00002-of-00002"),
        ({FIRST: part(0, 2), SECOND: part(0, 2)}, "split.no is 0, but the file name gives 1"),
        ({FIRST: part(0, 2), SECOND: part(1, 3)}, "'split.count' is 3, but 2 in m-00001"),
        ({FIRST: part(0, 2), SECOND: part(1, 2, total=9)}, "'split.tensors.count' is 9"),
        (
            {FIRST: part(0, 2, total=3), SECOND: part(1, 2, total=3)},
            "is 3, but the parts have 2 tensors",
        ),
        ({FIRST: part(0, 2, name="a"), SECOND: part(1, 2, name="a")}, "'a' is also in m-00001"),
        ({FIRST: part(0, 1)}, "split.count is 1, but the file name gives 2"),
        ({FIRST: build()}, "split.count is 1, but the file name gives 2"),
        ({"renamed.gguf": part(0, 2)}, "split.count is 2, but the file name gives 1"),
        ({"m-00001-of-00000.gguf": part(0, 0)}, "split.count is 0"),
        (
            {"m-00000-of-00002.gguf": part(0, 2), FIRST: part(0, 2), SECOND: part(1, 2)},
            "named NAME",
        ),
        (
            {
                FIRST: part(0, 2, key("general.name", STRING, text("a"))),
                SECOND: part(1, 2, key("general.name", STRING, text("b"))),
            },
            "'general.name' is 'b', but 'a' in m-00001-of-00002.gguf",
        ),
        (
            {
                FIRST: part(0, 2, key("a", ARRAY, array(U32, 2, bytes(8)))),
                SECOND: part(1, 2, key("a", U32, bytes(4))),
            },
            "'a' is 0, but array.* in m-00001-of-00002.gguf",
        ),
        *(
            (
                {"model.gguf": build([key(name, ARRAY, array(U32, 2, bytes(8)))])},
                f"{name} must be an integer, got array",
            )
            for name in ("split.no", "split.count", "split.tensors.count")
        ),
    ],
)
def test_parts_that_contradict_each_other_are_rejected(tmp_path, files, message):
    for name, raw in files.items():
        write(tmp_path, raw, name)
    with pytest.raises(WeightLoadError, match=message):
        read_gguf(tmp_path / next(iter(files)))


def test_the_only_model_of_a_folder_is_found(tmp_path):
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").mkdir()
    parts = split(tmp_path)
    assert find_gguf(tmp_path) == parts[0]
    write(tmp_path, valid(), "other.gguf")
    with pytest.raises(ConfigError, match=r"has 2 models.*model-00001-of-00003.*other\.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has 2 models"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("mmproj", "clip"), (None, "clip"), ("adapter", "llama"), ("imatrix", "imatrix")],
)
def test_files_that_are_not_models_by_their_metadata_are_skipped(tmp_path, kind, architecture):
    model = write(tmp_path, valid(), "z.gguf")
    keys = [key("general.architecture", STRING, text(architecture))]
    keys += [key("general.type", STRING, text(kind))] if kind else []
    other = write(tmp_path, build(keys), "a.gguf")
    assert find_gguf(tmp_path) == model
    model.unlink()
    assert find_gguf(tmp_path) == other  # The reader reports that it is not a language model.


def test_a_gguf_file_is_recognized_by_its_first_four_bytes(tmp_path):
    blob = write(tmp_path, valid(), "sha256-1f00")
    write(tmp_path, b'{"model_format": "gguf"}', "sha256-2f00")
    os.mkfifo(tmp_path / "fifo")
    assert find_gguf(tmp_path) == blob
    named = write(tmp_path, valid(), "model.GGUF")
    assert find_gguf(tmp_path) == named
    assert read_gguf(named).tensors.keys() == read_gguf(blob).tensors.keys()


def test_names_of_parts_may_be_in_upper_case(tmp_path):
    for number, path in enumerate(split(tmp_path)):
        path.rename(tmp_path / f"M-0000{number + 1}-of-00003.GGUF")
    found = find_gguf(tmp_path)
    assert found == tmp_path / "M-00001-of-00003.GGUF"
    assert {tensor.file.suffix for tensor in read_gguf(found).tensors.values()} == {".GGUF"}


def test_the_maximum_number_of_strings_applies_to_all_arrays_together(tmp_path, monkeypatch):
    three = text("a") + text("b") + text("c")
    keys = [key(name, ARRAY, array(STRING, 3, three)) for name in ("x", "y")]
    path = write(tmp_path, build(keys))
    monkeypatch.setattr("nanoengine.checkpoint.gguf.MAX_STRINGS", 8)  # includes key names
    assert read_gguf(path).metadata["y"] == ["a", "b", "c"]
    monkeypatch.setattr("nanoengine.checkpoint.gguf.MAX_STRINGS", 7)
    assert "y" in read_gguf(path).metadata, "a header that has not changed is not read again"
    os.utime(path, ns=(0, 0))
    message = "'y': with its 3 strings, there are 8; the maximum is 7"
    with pytest.raises(WeightLoadError, match=message):
        read_gguf(path)
