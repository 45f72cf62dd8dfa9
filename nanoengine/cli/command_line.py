"""The options of a command: the class that tyro parses, and the texts of --help and --help-all.

`--help` shows the options of COMMON, in their order; a name that a command lacks is ignored.
`--help-all` shows all: these groups first, then the command's own options, then the engine's. A
command that samples no answers has few options of its own, and `--help` shows all of these.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import shutil
import textwrap
from dataclasses import MISSING, field, make_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tyro.conf import Positional, UseAppendAction, arg

from nanoengine.cli.field_docs import field_docs
from nanoengine.cli.options import WITHOUT_OPTION, EngineArgs, SamplingArgs

COMMON = {
    "model": "model quantization max_model_len",
    "prompts": "inputs prompt file prompt_column template raw system",
    "answers": "max_tokens temperature top_p json_schema choices regex",
    "output": "output json restart dry_run",
}
GROUP_OF = {name: group for group, names in COMMON.items() for name in names.split()}
OWN, ENGINE = "options", "engine"
GROUPS, NAMES = [*COMMON, OWN, ENGINE], [*GROUP_OF]

POSITIONAL, REPEATABLE = (kind[str].__metadata__[0] for kind in (Positional, UseAppendAction))
INDENT, MAX_WIDTH, MAX_CHOICES = 26, 100, 4


class Option(NamedTuple):
    """A field of a command's class; its type may have annotations of tyro, the marks."""

    name: str
    kind: Any
    marks: tuple[Any, ...]
    default: Any
    text: str
    group: str
    is_common: bool

    @property
    def usage(self) -> str:
        """How the option is typed, with the type of its value."""
        if POSITIONAL in self.marks:
            name = getattr(self.marks[-1], "metavar", None) or self.name.upper()
            return name if self.default is MISSING else f"[{name}]"
        flag = "--" + self.name.replace("_", "-")
        if self.kind is bool:
            return flag if self.default is False else f"{flag}, --no-{flag[2:]}"
        kind = get_args(self.kind)[0] if REPEATABLE in self.marks else self.kind
        aliases = (getattr(mark, "aliases", None) or () for mark in self.marks)
        return ", ".join([*itertools.chain(*aliases), f"{flag} {_value(kind)}"])

    def help(self, width: int, *, is_full: bool) -> str:
        """Usage and description; if not full, only the first sentence of the description."""
        text = self.text if is_full else self.text.partition(". ")[0].rstrip(".") + "."
        if is_full and len(_choices(self.kind)) > MAX_CHOICES:
            text += f" One of {', '.join(_choices(self.kind))}."
        unset = (MISSING, None, False, ())
        if POSITIONAL not in self.marks and not any(self.default is one for one in unset):
            text += f" (default: {'yes' if self.default is True else self.default})"
        indent, usage = " " * INDENT, f"  {self.usage} "
        lines = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False).fill(text)
        return usage + lines[len(usage) :] if len(usage) <= INDENT else f"{usage[:-1]}\n{lines}"


def options_of(options_class: type) -> list[Option]:
    """The options of a command, in the order of --help-all."""
    docs, is_engine = field_docs(options_class), issubclass(options_class, EngineArgs)
    samples, found = "sampling" in options_class.__dataclass_fields__, []
    for owner in (options_class, SamplingArgs) if samples else (options_class,):
        for name, hint in get_type_hints(owner, include_extras=True).items():
            if name in WITHOUT_OPTION or hint is SamplingArgs:
                continue
            marks, group = getattr(hint, "__metadata__", ()), OWN
            text = docs.get(name) or marks[-1].help
            # Why: None can't be given on the command line.
            text = re.sub(r"(^|[.] )None:", r"\1Default:", text).replace("None:", "default:")
            if owner is SamplingArgs:
                text, group = text[0].upper() + text[1:], "answers"
            elif is_engine and name in EngineArgs.__dataclass_fields__:
                group = ENGINE
            is_common = not is_engine or name in NAMES or (group == OWN and not samples)
            group = GROUP_OF.get(name, group) if is_engine else OWN
            default = owner.__dataclass_fields__[name].default
            kind = hint.__origin__ if marks else hint
            found.append(Option(name, kind, marks, default, text, group, is_common))
    if is_engine:
        found.sort(key=lambda one: (GROUPS.index(one.group), [*NAMES, one.name].index(one.name)))
    return found


@functools.cache
def flat_class(options_class: type) -> type:
    """A class with the same options for tyro, which has no checks and no nested classes."""
    options = []
    for one in options_of(options_class):
        marks = (*one.marks, arg(help=one.text, help_behavior_hint=""))
        options.append((one.name, Annotated[(one.kind, *marks)], field(default=one.default)))
    return make_dataclass(options_class.__name__, options, kw_only=True)


def help_text(options_class: type, prog: str, *, is_full: bool) -> str:
    """The text of --help or, if full, of --help-all."""
    options = options_of(options_class)
    shown = [one for one in options if is_full or one.is_common]
    needed = [one.usage for one in options if one.default is MISSING or POSITIONAL in one.marks]
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    about = (inspect.getdoc(options_class) or "").partition("\n\nAttributes:")[0]
    lines = [" ".join(["usage:", prog, *needed, "[OPTIONS]"]), "", about]
    for group, members in itertools.groupby(shown, key=lambda one: one.group):
        lines += ["", group, *(one.help(width, is_full=is_full) for one in members)]
    if len(shown) < len(options):
        lines += ["", f"{prog} --help-all shows all {len(options)} options."]
    return "\n".join(lines)


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal in a type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next(filter(None, map(_choices, get_args(kind))), ())


def _value(kind: Any) -> str:
    """How a value of a type is typed, such as INT or int8|..."""
    if names := _choices(kind):
        return "|".join(names if len(names) <= MAX_CHOICES else (names[0], "..."))
    args = [_value(one) for one in get_args(kind) if one not in (NoneType, Ellipsis)]
    if get_origin(kind) in (tuple, dict):
        return " ".join(args) + " ..." * (Ellipsis in get_args(kind) or get_origin(kind) is dict)
    return "|".join(args) or ("True|False" if kind is bool else kind.__name__.upper())
