"""Groups of options, so that the help of a command with seventy options is readable.

The options of a command are one flat class, but tyro's help shows a box per nested class. So this
module splits the flat class into one nested class per group, and rebuilds it after parsing.

GROUPS defines the boxes: a title, and the options in order. If several boxes name an option, it is
in the last of them. Options without a group are specific to the command and come first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, get_type_hints

import tyro

from nanoengine.cli.field_docs import field_docs
from nanoengine.cli.options import WITHOUT_OPTION
from nanoengine.settings.config import EngineConfig

GROUPS = {
    "model": ("The model, and how it computes.", " ".join(EngineConfig.__dataclass_fields__)),
    "memory": ("The KV cache: its size, and where blocks are kept.",
        """max_model_len num_blocks block_size num_kv_blocks kv_cache_gib memory_fraction
        gpu_memory_utilization enable_prefix_caching kv_cache_dtype kv_host_gib kv_disk
        kv_disk_gib"""),
    "scheduling": ("How sequences are scheduled.",
        """max_num_seqs max_num_batched_tokens enable_chunked_prefill long_prefill_threshold
        watermark_frac admission speculative debug_checks overlap"""),
    "watching": ("Records or draws each step.", "trace watch"),
}  # fmt: skip

POSITIONAL = tyro.conf.Positional[int].__metadata__[0]
BOXES = {name: box for box, (_, names) in GROUPS.items() for name in names.split()}


@functools.cache
def grouped_class(options_class: type) -> type:
    """A class with the same options for tyro: positional options and options without a group are
    fields, and each group is a nested class. Fields that are classes already come last."""
    docs, hints = field_docs(options_class), get_type_hints(options_class, include_extras=True)
    boxes: dict[str, list[Any]] = {"": [], **{box: [] for box in GROUPS}, "last": []}
    for option in dataclasses.fields(options_class):
        name = option.name
        if name in WITHOUT_OPTION:
            continue
        hint, box = hints[name], BOXES.get(name, "")
        if POSITIONAL in getattr(hint, "__metadata__", ()):
            box = ""
        if dataclasses.is_dataclass(hint):
            box = "last"
        elif name in docs:
            hint = Annotated[hint, tyro.conf.arg(help=docs[name])]
        default = dataclasses.field(default=option.default, default_factory=option.default_factory)
        boxes[box].append((name, hint, default))
    root, last = boxes.pop(""), boxes.pop("last")
    for box, options in boxes.items():
        if options:
            title, names = GROUPS[box]
            options.sort(key=lambda option: names.split().index(option[0]))
            inner = dataclasses.make_dataclass(box, options, frozen=True, kw_only=True)
            inner.__doc__ = title
            hint = Annotated[inner, tyro.conf.arg(name=box)]  # type: ignore[valid-type]
            root.append((f"{box}_group", hint, dataclasses.field()))  # Why _group: --model exists.
    cls = dataclasses.make_dataclass(options_class.__name__, [*root, *last], kw_only=True)
    cls.__doc__ = options_class.__doc__
    return cls


def flatten(options_class: type, parsed: Any) -> Any:
    """Converts an object of a class from `grouped_class` to the flat options.

    Raises:
        ConfigError: they contradict each other, or one is out of range.
    """
    values: dict[str, Any] = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if name.endswith("_group") else {name: value}
    return options_class(**values)
