"""EngineArgs and FlexibleArgumentParser: the arguments of vLLM's LLM as a dataclass and as options.

An argument with vLLM's default has no effect: `non_default_options` drops it. So programs that
pass all of them, `LLM(**vars(args))`, only set what their user has set.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.settings.vllm_names import NAMES

DEFAULTS: dict[str, Any] = {name: entry["default"] for name, entry in NAMES["LLM"].items()}
"""Name -> vLLM's default, for arguments that have a meaning here."""

FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
"""Boolean arguments whose default is None."""


def non_default_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from vLLM's defaults."""
    return {n: v for n, v in options.items() if n not in DEFAULTS or v not in (DEFAULTS[n], {})}


class Arguments:
    """The methods of EngineArgs."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds one option per argument."""
        for name, default in DEFAULTS.items():
            kind: dict[str, Any] = {"type": str if isinstance(default, str) else literal}
            if isinstance(default, bool) or name in FLAGS:
                kind = {"action": argparse.BooleanOptionalAction}
            parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Arguments:
        """The engine arguments among parsed options."""
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})


EngineArgs = dataclasses.make_dataclass(
    "EngineArgs",
    [(name, Any, default) for name, default in DEFAULTS.items()],
    bases=(Arguments,),
    namespace={"__module__": __name__},
)
"""The arguments of LLM as a dataclass; an unknown one raises TypeError."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser whose options may be written with - or _."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like argparse's, with _ in option names replaced by -."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_dashes(word) for word in words], namespace)


def with_dashes(word: str) -> str:
    """An option's name with - instead of _; any other word as is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def literal(word: str) -> Any:
    """A number, list or dict if the word is one, else the word."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
