"""Groups of options, so that the help of a command with seventy options is readable.

The options of a command are one flat class. tyro shows a box in the help per nested class. So this
module splits the flat class into one class per group, and rebuilds the flat one after parsing.

GROUPS defines the boxes: a title, and the options in order. If several boxes name an option, the
last one gets it. An option without a group is specific to the command, and shown with --help.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, get_type_hints

import tyro

from nanoengine.cli.field_docs import field_docs
from nanoengine.cli.options import OBJECTS
from nanoengine.settings.config import EngineConfig

GROUPS = {
    "model": ("What is loaded, and how it computes.", " ".join(EngineConfig.__dataclass_fields__)),
    "memory": ("The KV cache: its size, and where blocks are kept.",
        """max_model_len num_blocks block_size num_kv_blocks kv_cache_gib memory_fraction
        gpu_memory_utilization enable_prefix_caching kv_cache_dtype kv_host_gib kv_disk
        kv_disk_gib"""),
    "scheduling": ("What runs when, and on how many processes.",
        """max_num_seqs max_num_batched_tokens enable_chunked_prefill long_prefill_threshold
        watermark_frac admission preempt_above admit_below speculative debug_checks overlap"""),
    "watching": ("What each step does.", "trace trace_steps watch"),
}  # fmt: skip

POSITIONAL = tyro.conf.Positional[int].__metadata__[0]
BOXES = {name: box for box, (_, names) in GROUPS.items() for name in names.split()}


@functools.cache
def grouped(options_class: type) -> type:
    """A class with the same options for tyro: positional options and options without a group are
    fields, and each group is a nested class. A field that is a class of options stays as it is."""
    told, hints = field_docs(options_class), get_type_hints(options_class, include_extras=True)
    boxes: dict[str, list[Any]] = {"": [], **{box: [] for box in GROUPS}, "last": []}
    for one in dataclasses.fields(options_class):
        if one.name in OBJECTS:
            continue
        hint, box = hints[one.name], BOXES.get(one.name, "")
        if POSITIONAL in getattr(hint, "__metadata__", ()):
            box = ""
        if dataclasses.is_dataclass(hint):
            box = "last"
        elif one.name in told:
            hint = Annotated[hint, tyro.conf.arg(help=told[one.name])]
        default = dataclasses.field(default=one.default, default_factory=one.default_factory)
        boxes[box].append((one.name, hint, default))
    root, last = boxes.pop(""), boxes.pop("last")
    for box, options in boxes.items():
        if options:
            what, names = GROUPS[box]
            options.sort(key=lambda one: names.split().index(one[0]))
            inner = dataclasses.make_dataclass(box, options, frozen=True, kw_only=True)
            inner.__doc__ = what
            hint = Annotated[inner, tyro.conf.arg(name=box)]  # type: ignore[valid-type]
            root.append((f"{box}_group", hint, dataclasses.field()))  # An option may be `model`.
    cls = dataclasses.make_dataclass(options_class.__name__, [*root, *last], kw_only=True)
    cls.__doc__ = options_class.__doc__
    return cls


def flat(options_class: type, parsed: Any) -> Any:
    """Converts an object of a class from `grouped` to the flat options.

    Raises:
        ConfigError: they contradict each other, or one is out of range.
    """
    values: dict[str, Any] = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if name.endswith("_group") else {name: value}
    return options_class(**values)
