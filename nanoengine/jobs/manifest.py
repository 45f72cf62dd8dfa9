"""The manifest next to an output: the same command resumes the job, and another one is refused."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanoengine.checkpoint.config import GENERATION_DEFAULTS, load_model_config
from nanoengine.checkpoint.files import checkpoint_files, file_digest
from nanoengine.errors import ConfigError
from nanoengine.jobs.record_log import replacing
from nanoengine.jobs.source import STDIN, Input, digest
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.files import is_gguf

FORMAT = 2
NOT_COMPARED = ("created", "inputs", "sampling_defaults")

ASIDE = (
    "name another output, or move this one aside, as `nanoengine batch` does with --restart"
)  # fmt: skip
"""A hint for errors. It names the command, since other commands and Python lack the option."""

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
            "name": one.name.replace(os.sep, "/"),
            "form": one.form,
            "bytes": one.num_bytes,
            "xxh3": digest(one.name, one.num_bytes),
        }
        for one in inputs
        if one.name != STDIN
    ]


def changed_inputs(before: list[dict[str, Any]]) -> Iterator[str]:
    """Messages on the inputs, as `describe_inputs` returned them, whose content has changed."""
    for one in before:
        with contextlib.suppress(OSError):
            if digest(one["name"], one["bytes"]) == one["xxh3"]:
                continue
        yield f"{one['name']}: its content has changed"


def describe_engine(config: EngineConfig, name: str) -> dict[str, Any]:
    """What results depend on in model and engine: settings, and a digest per file.

    Raises:
        ConfigError: there is no such model.
        WeightLoadError: the checkpoint has no weights that can be read.
    """
    from nanoengine.checkpoint.find import resolve_model

    directory = resolve_model(config)
    weights = checkpoint_files(directory) if config.load_format == "auto" else []
    facts = {
        "model": {"name": name, "files": _digests(directory, weights)},
        "engine": {setting: getattr(config, setting) for setting in RESULT_SETTINGS},
        "random_numbers": "by a row's id, else its number",
        "sampling_defaults": sampling_line(config, load_model_config(directory)),
    }
    tokenizer = os.path.expanduser(config.tokenizer or "")
    if os.path.exists(tokenizer):
        facts["tokenizer"] = _digests(Path(tokenizer))
    return facts


SHOWN = {*GENERATION_DEFAULTS} - {"max_tokens"}
"""Sampling parameters that are reported: the ones that a checkpoint may set."""


def sampling_line(config: EngineConfig, info: Any, given: Mapping[str, Any] | None = None) -> str:
    """The sampling parameters of prompts that set none, and the source of each value.

    Args:
        info: an object with the model's `generation_defaults`.
        given: options of the command line.
    """
    from nanoengine.checkpoint.find import resolve_model

    places = ("general.sampling.*", "file"), ("generation_config.json", "checkpoint")
    file, place = places[not is_gguf(resolve_model(config))]
    none = "" if info.generation_defaults else f"; the {place} has none"
    found = {"temperature": (1.0, f"the engine's default{none}")}
    found |= {name: (value, file) for name, value in info.generation_defaults.items()}
    found |= {name: (value, "the command's options") for name, value in (given or {}).items()}
    by_source = defaultdict(list)
    for name, (value, source) in found.items():
        if name in SHOWN:
            by_source[source].append(f"{name} {value}")
    return "; ".join(f"{', '.join(values)} ({source})" for source, values in by_source.items())


def _digests(directory: Path, weights: Iterable[Path] = ()) -> dict[str, str]:
    if directory.is_file():  # Why: a GGUF file, or its parts, contains everything.
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
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def load(path: Path, **types: type) -> dict[str, Any] | None:
    """The manifest of an earlier run; None if there was none.

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
        raise ConfigError(f"{path} can't be read: {error}; {ASIDE}") from error
    is_ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    is_ours = is_ours and all(isinstance(manifest.get(name), kind) for name, kind in types.items())
    for one in manifest["inputs"] if is_ours and "inputs" in types else ():
        is_ours &= isinstance(one, dict) and one.keys() >= {"name", "bytes", "xxh3"}
        is_ours = is_ours and isinstance(one["bytes"], int)
    if not is_ours:
        raise ConfigError(f"{path} is no manifest of format {FORMAT}; {ASIDE}")
    return manifest


def require_same(before: dict[str, Any], now: dict[str, Any], inputs: list[Input]) -> None:
    """Raises ConfigError unless `now` continues the job `before`.

    Inputs may have grown: the last one by lines, and by further inputs after it.
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
    told += _differing_inputs(before["inputs"], now["inputs"], inputs)
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
    """Whether lines were appended to the old content, which is unchanged."""
    size = int(old["bytes"])
    may_grow = one.packing is None and one.form not in ("parquet", "json")
    if not may_grow or new["bytes"] <= size or digest(one.name, size) != old["xxh3"]:
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
