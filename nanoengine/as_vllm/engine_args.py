"""EngineArgs and FlexibleArgumentParser: the arguments of vLLM's LLM, as a value and as options of
a command line.

An argument that has vLLM's default asks for nothing: `asked` leaves it out, so that programs which
hand all of them on, `LLM(**vars(args))`, ask for what their user has set.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from nanoengine.errors import ConfigError
from nanoengine.settings.vllm_names import LLM_OPTIONS

DEFAULTS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "revision": None,
    "max_model_len": None,
    "max_num_batched_tokens": None,
    "block_size": None,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.92,
    "enforce_eager": False,
    **dict.fromkeys(LLM_OPTIONS),
    **dict.fromkeys(
        "dtype kv_cache_dtype load_format tokenizer_mode config_format model_impl generation_config"
        " task runner convert".split(),
        "auto",
    ),
    **dict.fromkeys(
        "disable_log_stats disable_custom_all_reduce enable_expert_parallel enable_lora"
        " enable_sleep_mode disable_sliding_window calculate_kv_scales use_v2_block_manager"
        " disable_async_output_proc".split(),
        False,
    ),
    **dict.fromkeys("pipeline_parallel_size data_parallel_size max_loras".split(), 1),
    **{"seed": 0, "long_prefill_token_threshold": 0, "max_logprobs": 20, "max_lora_rank": 16},
    **{"scheduling_policy": "fcfs", "reasoning_parser": "", "allowed_local_media_path": ""},
    **{"cpu_offload_gb": 0, "hf_overrides": {}, "override_generation_config": {}},
    **{"limit_mm_per_prompt": {}},
}
"""Name -> vLLM's default, of arguments that have a meaning here."""

FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
"""Those of the default None that are True or False."""


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ask for something."""
    return {
        name: value
        for name, value in options.items()
        if name not in DEFAULTS or name == "model" or value != DEFAULTS[name]
    }


class Arguments:
    """The methods of EngineArgs."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds an option for each argument."""
        group = parser.add_argument_group("EngineArgs")
        for name, default in DEFAULTS.items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(default, bool) or name in FLAGS:
                group.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
            else:
                parse = str if isinstance(default, str) else literal
                group.add_argument(option, type=parse, default=default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Arguments:
        """The arguments among those of a command line."""
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})

    def create_engine_config(self, *args: object, **options: object) -> NoReturn:
        """vLLM's configuration objects have no counterpart."""
        raise ConfigError("create_engine_config is not offered: LLM takes the arguments")

    create_model_config = create_engine_config


EngineArgs = dataclasses.make_dataclass(
    "EngineArgs",
    [
        (name, Any, dataclasses.field(default_factory=type(default)))
        if isinstance(default, dict)
        else (name, Any, default)
        for name, default in DEFAULTS.items()
    ],
    bases=(Arguments,),
)
"""Arguments of LLM as a dataclass; an unknown one is a TypeError."""
EngineArgs.__module__ = __name__


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser whose options may be written with - and with _."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, behind options with _ in their names."""
        import sys

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(dashed, words)), namespace)


def dashed(word: str) -> str:
    """An option's name with - for _; any other word as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def literal(word: str) -> Any:
    """A number, list or dict, if the word is one; else the word."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
