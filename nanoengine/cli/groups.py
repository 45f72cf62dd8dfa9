"""Options in groups, so that the help of a command of seventy options can be read.

A command's options are one flat class. tyro makes a box of the help of each nested class, so here
the flat class is taken apart into one class a group, and put together again from what was parsed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

import tyro

from nanoengine.settings.config import EngineConfig

T = TypeVar("T")


class Group(NamedTuple):
    """A box of the help: what it says first, and the options in it."""

    title: str
    names: tuple[str, ...]


GROUPS = {
    "input": Group(
        "What is asked, and how rows are understood.",
        (
            "prompt", "file", "input_format", "prompt_column", "template", "chat", "system",
            "any_model", "ignore_unknown", "strict", "max_row_mib", "dataset", "workload",
            "num_requests", "input_len", "output_len", "prefix_len", "length_cap",
        ),
    ),
    "output": Group(
        "Where answers go, and what happens to rows without one.",
        (
            "output", "errors", "in_order", "summary_json", "max_errors", "fail_fast",
            "retry_errors", "restart", "grace", "json", "out",
        ),
    ),
    "model": Group(
        "What is loaded, and how it computes.",
        (
            "model", "shape", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "revision",
            "load_format", "dtype", "quantization", "device", "tensor_parallel_size", "seed",
            "attention_backend", "cpu_isa", "enforce_eager", "deterministic",
        ),
    ),
    "memory": Group(
        "The KV cache: its size, and where blocks are kept.",
        (
            "max_model_len", "block_size", "num_blocks", "num_kv_blocks", "kv_cache_gib",
            "memory_fraction", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching",
            "kv_tiers", "kv_host_gib", "kv_disk", "kv_disk_gib",
        ),
    ),
    "scheduling": Group(
        "What runs when, and on how many processes.",
        (
            "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
            "long_prefill_threshold", "watermark_frac", "admission", "preempt_above", "admit_below",
            "speculative", "overlap", "keep_input_order", "replicas", "threads", "ray",
            "debug_checks",
        ),
    ),
    "watching": Group("What each step does.", ("watch", "trace", "trace_steps")),
}  # fmt: skip
"""A setting of the engine that none of them names is one of the model; of another option the box
has no name."""


def group_of(name: str) -> str | None:
    """The group of an option; None: it stands beside --help."""
    for group, (_, names) in GROUPS.items():
        if name in names:
            return group
    return "model" if name in EngineConfig.__dataclass_fields__ else None


@functools.cache
def grouped(options_class: type) -> type:
    """A class of the same options as tyro takes it: positional ones and those of no group at its
    root, a nested class for each group. A field that is a class of options is a group already."""
    told, hints = _docstrings(options_class), get_type_hints(options_class, include_extras=True)
    root: list[tuple[str, Any, Any]] = []
    last: list[tuple[str, Any, Any]] = []
    nested: dict[str, list[tuple[str, Any, Any]]] = {group: [] for group in GROUPS}
    for one in dataclasses.fields(options_class):
        hint = hints[one.name]
        if one.name in told:
            hint = Annotated[hint, tyro.conf.arg(help=told[one.name])]
        default = dataclasses.field(default=one.default, default_factory=one.default_factory)
        group = None if _is_positional(hint) else group_of(one.name)
        place = last if dataclasses.is_dataclass(hint) else nested.get(group or "", root)
        place.append((one.name, hint, default))
    for group, options in nested.items():
        if options:
            inner = dataclasses.make_dataclass(group, options, frozen=True, kw_only=True)
            inner.__doc__ = GROUPS[group].title
            hint = Annotated[inner, tyro.conf.arg(name=group)]  # type: ignore[valid-type]
            root.append((_field_of(group), hint, dataclasses.field()))
    cls = dataclasses.make_dataclass(options_class.__name__, [*root, *last], kw_only=True)
    cls.__doc__ = options_class.__doc__
    return cls


def flat(options_class: type[T], parsed: Any) -> T:
    """The options, of an object of the class that `grouped` has made.

    Raises:
        ConfigError: they contradict each other, or one is out of range.
    """
    values = dict(vars(parsed))
    for group in GROUPS:
        values |= vars(values.pop(_field_of(group), None) or _NOTHING)
    return options_class(**values)


_NOTHING = type("Nothing", (), {})()


def _field_of(group: str) -> str:
    """Why not its name: an option may have it, as `model` does."""
    return f"{group}_group"


def _is_positional(hint: Any) -> bool:
    return get_origin(hint) is Annotated and tyro.conf.Positional[int].__metadata__[0] in (
        hint.__metadata__
    )


def _docstrings(options_class: type) -> dict[str, str]:
    """The string below each field, of the class and those that it extends."""
    told: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for before, node in zip(definition.body, definition.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    told[name] = " ".join(text.split())
    return told
