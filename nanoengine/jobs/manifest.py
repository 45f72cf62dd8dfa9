"""The manifest of a job, next to its output: what the answers depend on. The same command resumes
the job; a command with another model, other inputs or options is refused."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.files import checkpoint_files, file_digest
from nanoengine.errors import ConfigError
from nanoengine.jobs.record_log import atomic_write
from nanoengine.jobs.rows import MAX_TOKENS
from nanoengine.jobs.source import STDIN, Input, digest
from nanoengine.settings.checks import truncate
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.files import is_gguf

FORMAT = 2
NOT_COMPARED = ("created", "inputs", "sampling_defaults")
"""Fields in which the manifest of a resumed job may differ; inputs are compared separately."""

HINTS = {"rows.chat": " (whether prompts are sent as chat messages; false is --raw)"}
"""Explanations of fields that no option is named after."""

START_OVER_HINT = "name another output, or let `nanoengine batch` move this one with --restart"
"""A hint in errors. It names the command, because other commands and Python lack --restart."""

RESULT_SETTINGS = (
    "tokenizer", "chat_template", "skip_tokenizer_init", "revision", "load_format", "dtype",
    "quantization", "device", "tensor_parallel_size", "seed", "max_model_len", "kv_cache_dtype",
    "deterministic", "attention_backend",
)  # fmt: skip
"""Settings of the engine that results depend on; a job must be resumed with the same ones."""

TEXT_FILES = (".json", ".jinja", ".model", ".py", ".txt")
"""Files of a checkpoint other than weights: configs, the tokenizer, its template and its code."""


def describe_inputs(inputs: list[Input]) -> list[dict[str, Any]]:
    """Names, sizes and digests of the input files; stdin has none."""
    return [
        {
            "name": source.name.replace(os.sep, "/"),
            "form": source.form,
            "bytes": source.num_bytes,
            "xxh3": digest(source.name, source.num_bytes),
        }
        for source in inputs
        if source.name != STDIN
    ]


def changed_inputs(described: list[dict[str, Any]]) -> Iterator[str]:
    """A message for each input that has changed since `describe_inputs` returned `described`."""
    for source in described:
        with contextlib.suppress(OSError):
            if digest(source["name"], source["bytes"]) == source["xxh3"]:
                continue
        yield f"{source['name']}: its content has changed"


def describe_engine(config: EngineConfig, name: str) -> dict[str, Any]:
    """The engine's settings that answers depend on, and a digest per file of the model.

    Raises:
        ConfigError: there is no such model.
        WeightLoadError: the checkpoint has no weights that can be read.
    """
    from nanoengine.checkpoint.find import resolve_model

    directory = resolve_model(config)
    model = load_model_config(directory)
    model.context_len(config.max_model_len)  # Why: it raises before --restart moves files.
    weights = checkpoint_files(directory) if config.load_format == "auto" else []
    description = {
        "model": {"name": name, "files": _digests(directory, weights)},
        "engine": {setting: getattr(config, setting) for setting in RESULT_SETTINGS},
        "random_numbers": "by a row's id, else its number",
        "sampling_defaults": sampling_line(config, model),
    }
    tokenizer = os.path.expanduser(config.tokenizer or "")
    if os.path.exists(tokenizer):
        description["tokenizer"] = _digests(Path(tokenizer))
    return description


def sampling_line(config: EngineConfig, info: Any, options: Mapping[str, Any] | None = None) -> str:
    """The sampling parameters of prompts that set none, and the source of each value.

    Args:
        info: an object with the model's `generation_defaults`.
        options: sampling parameters that the command sets.
    """
    from nanoengine.checkpoint.find import resolve_model

    sources = ("general.sampling.*", "file"), ("generation_config.json", "checkpoint")
    keys, container = sources[not is_gguf(resolve_model(config))]
    missing = "" if info.generation_defaults else f"; the {container} has none"
    params: dict[str, Any] = {"temperature": (1.0, f"the engine's default{missing}")}
    params["max_tokens"] = MAX_TOKENS["simple"], "the commands' default; OpenAI rows have OpenAI's"
    params |= {name: (value, keys) for name, value in info.generation_defaults.items()}
    params |= {name: (value, "set by the command") for name, value in (options or {}).items()}
    by_source = defaultdict(list)
    for name, (value, source) in params.items():
        if value is not None:
            by_source[source].append(f"{name} {truncate(value)}")
    return "; ".join(f"{', '.join(values)} ({source})" for source, values in by_source.items())


def _digests(directory: Path, weights: Iterable[Path] = ()) -> dict[str, str]:
    if directory.is_file():  # Why: a GGUF file, or all its parts, contains everything.
        return {path.name: file_digest(path).hex() for path in weights or [directory]}
    texts = (path for path in directory.iterdir() if path.suffix in TEXT_FILES and path.is_file())
    files = sorted({*texts, *weights})
    return {path.relative_to(directory).as_posix(): file_digest(path).hex() for path in files}


def save(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest atomically.

    Raises:
        OutputLostError: it can't be written.
    """
    text = json.dumps(manifest, ensure_ascii=False, indent=1)
    with atomic_write(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def load(path: Path, **types: type) -> dict[str, Any] | None:
    """The manifest of the earlier run; None if there is none.

    Args:
        types: required fields and their types; inputs must be as `describe_inputs` returns them.

    Raises:
        ConfigError: it can't be read, or has another format.
    """
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}; {START_OVER_HINT}") from error
    is_valid = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    is_valid = is_valid and all(isinstance(manifest.get(key), kind) for key, kind in types.items())
    for source in manifest["inputs"] if is_valid and "inputs" in types else ():
        is_valid &= isinstance(source, dict) and source.keys() >= {"name", "bytes", "xxh3"}
        is_valid = is_valid and isinstance(source["bytes"], int)
    if not is_valid:
        raise ConfigError(f"{path} is not a manifest of format {FORMAT}; {START_OVER_HINT}")
    return manifest


def require_same(before: dict[str, Any], now: dict[str, Any], inputs: list[Input]) -> None:
    """Raises ConfigError, with all differences, unless `now` continues the job `before`.

    The last input may have more lines than before, and more inputs may follow it.
    """
    old, new = (
        dict(_flatten({name: part for name, part in manifest.items() if name not in NOT_COMPARED}))
        for manifest in (before, now)
    )
    differences = [
        f"{name}: it was {_as_json(old.get(name))}, it is {_as_json(new.get(name))}"
        + HINTS.get(name, "")
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    differences += _differing_inputs(before["inputs"], now["inputs"], inputs)
    if differences:
        lines = "\n  ".join(["the output belongs to another job:", *differences])
        raise ConfigError(f"{lines}\n{START_OVER_HINT}")


def _differing_inputs(
    before: list[dict[str, Any]], now: list[dict[str, Any]], inputs: list[Input]
) -> Iterator[str]:
    if len(now) < len(before):
        names = [[source["name"] for source in files] for files in (before, now)]
        yield f"inputs: they were {_as_json(names[0])}, they are {_as_json(names[1])}"
        return
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old == new:
            continue
        if old["name"] != new["name"]:
            yield f"inputs[{number}]: it was {_as_json(old['name'])}, it is {_as_json(new['name'])}"
        elif old.get("form") != new["form"]:
            yield f"{old['name']}: it was read as {old.get('form')}, now as {new['form']}"
        elif number < len(before) - 1 or not _has_grown(old, new, inputs[number]):
            sizes = f"{old['bytes']:,} bytes, now {new['bytes']:,}"
            yield f"{old['name']}: its content has changed (it had {sizes})"


def _has_grown(old: dict[str, Any], new: dict[str, Any], source: Input) -> bool:
    """Whether lines were appended to the old content, which is unchanged."""
    size = int(old["bytes"])
    may_grow = source.compression is None and source.form not in ("parquet", "json")
    if not may_grow or new["bytes"] <= size or digest(source.name, size) != old["xxh3"]:
        return False
    with open(source.name, "rb") as file:
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
