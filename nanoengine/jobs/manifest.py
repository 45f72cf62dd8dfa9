"""What a job is, beside its output: so that the same command resumes it and another is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from nanoengine.errors import ConfigError
from nanoengine.jobs.log import lost, sync_directory
from nanoengine.jobs.source import STDIN, Input, digest
from nanoengine.settings.config import EngineConfig

FORMAT = 1
NOT_COMPARED = ("created", "inputs")
HEADER_BYTES = 8
"""A safetensors file begins with the length of its header."""

ASIDE = (
    "name another output, or move this one aside, as `nanoengine batch` does with --restart"
)  # fmt: skip
"""What to do. Why the command's name: other commands, and Python, have no such option."""

RESULT_SETTINGS = (
    "tokenizer", "skip_tokenizer_init", "revision", "load_format", "dtype", "quantization",
    "device", "tensor_parallel_size", "seed", "max_model_len", "kv_cache_dtype", "deterministic",
    "attention_backend",
)  # fmt: skip
"""Settings of the engine that results depend on: a job is resumed with the same ones."""

MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")


def describe_inputs(inputs: list[Input]) -> list[dict[str, Any]]:
    """Names, sizes and digests of the files; stdin has none."""
    return [
        {
            "name": one.name,
            "form": one.form,
            "bytes": one.num_bytes,
            "xxh3": digest(one.name, one.num_bytes),
        }
        for one in inputs
        if one.name != STDIN
    ]


def describe_model(directory: Path) -> str:
    """A digest of a checkpoint's files: names, sizes, and what is in them; of weights
    the headers."""
    hasher = xxhash.xxh3_128()
    for path in sorted(p for p in directory.iterdir() if p.suffix in MODEL_FILES):
        size = path.stat().st_size
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES if path.suffix == ".safetensors" else -1)
            if path.suffix == ".safetensors":
                content += file.read(min(int.from_bytes(content, "little"), size))
        hasher.update(f"{path.name}\0{size}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()


def describe_engine(config: EngineConfig, directory: Path, name: str) -> dict[str, Any]:
    """All of model and engine that results depend on."""
    settings = {setting: getattr(config, setting) for setting in RESULT_SETTINGS}
    return {"model": {"name": name, "xxh3": describe_model(directory)}, "engine": settings}


def save(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes it whole or not at all.

    Raises:
        OutputLostError: it can't be written.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(manifest, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise lost(path, error) from error
    sync_directory(path)


def load(path: Path) -> dict[str, Any] | None:
    """The manifest of an earlier run; None if there was none.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}; {ASIDE}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is no manifest of format {FORMAT}; {ASIDE}")
    return manifest


def require_same(before: dict[str, Any], now: dict[str, Any], inputs: list[Input]) -> None:
    """Raises ConfigError unless `now` goes on with the job `before`.

    Inputs may have grown: the last one by lines, and further ones behind it.
    """
    old, new = (
        dict(_flat({name: part for name, part in manifest.items() if name not in NOT_COMPARED}))
        for manifest in (before, now)
    )
    told = [
        f"{name}: it was {_shown(old.get(name))}, it is {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    told += _differing_inputs(before.get("inputs", []), now["inputs"], inputs)
    if told:
        raise ConfigError(
            "this is another job than the one whose output is there:\n  "
            + "\n  ".join(told)
            + f"\n{ASIDE}"
        )


def _differing_inputs(
    before: list[dict[str, Any]], now: list[dict[str, Any]], inputs: list[Input]
) -> Iterator[str]:
    if len(now) < len(before):
        names = [[one["name"] for one in files] for files in (before, now)]
        yield f"inputs: they were {_shown(names[0])}, they are {_shown(names[1])}"
        return
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old == new:
            continue
        if old["name"] != new["name"]:
            yield f"inputs[{number}]: it was {_shown(old['name'])}, it is {_shown(new['name'])}"
        elif old.get("form") != new["form"]:
            yield f"{old['name']}: it was read as {old.get('form')}, now as {new['form']}"
        elif number < len(before) - 1 or not _has_grown(old, new, inputs[number]):
            sizes = f"{old['bytes']:,} bytes, now {new['bytes']:,}"
            yield f"{old['name']}: its content has changed (it had {sizes})"


def _has_grown(old: dict[str, Any], new: dict[str, Any], one: Input) -> bool:
    """Whether lines were added behind the old ones, which are all there."""
    size = int(old["bytes"])
    if not one.may_grow or new["bytes"] <= size or digest(one.name, size) != old["xxh3"]:
        return False
    with open(one.name, "rb") as file:
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
