"""`nanoengine eval MODEL ...`: scores a model on tasks of lm-evaluation-harness.

Its own command line takes over: `--tasks`, `--num_fewshot`, `--apply_chat_template` and all others
are the harness's, and `--model_args name=value,...` sets fields of EngineConfig.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nanoengine.cli.options import DEMO
from nanoengine.errors import ConfigError

USAGE = """usage: nanoengine eval MODEL --tasks TASK [TASK ...] [options of lm-eval run]

Scores MODEL (a directory, a hub id, or `demo`) with lm-evaluation-harness.

  nanoengine eval demo --tasks my_task --include_path tasks/
  nanoengine eval Qwen/Qwen3-0.6B --tasks arc_easy hellaswag --num_fewshot 5
  nanoengine eval ./model --tasks gsm8k --apply_chat_template --model_args dtype=bfloat16

Fields of EngineConfig go into --model_args; `lm-eval run --help` shows the other options."""


def main(args: Sequence[str]) -> int:
    """Runs the harness's `run` command with the model registered; returns the exit status."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    model, *rest = args
    if model.startswith("-"):
        raise ConfigError(f"nanoengine eval MODEL ...: the model comes first, got {model!r}")
    if "," in model or "=" in model:
        raise ConfigError(f"a path for lm-eval can't hold ',' or '=', got {model!r}")
    if model == DEMO:
        from nanoengine.assets import demo_model_path

        model = str(demo_model_path())
    _check(rest)
    from nanoengine import evaluation  # noqa: F401, I001  # It registers the model, and names the extra.
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm-eval", "run", "--model", "nanoengine", "--model_args", f"pretrained={model}"]
    sys.argv += ["--device", "auto", *rest]  # Why: the harness's own default is a GPU.
    try:
        cli_evaluate()
    except ValueError as error:
        raise ConfigError(f"lm-eval: {error}") from error
    return 0


def _check(args: Sequence[str]) -> None:
    """Looks at what the harness would look at when a model has loaded, or all is computed.

    Raises:
        ConfigError: no question is asked, or the results can't be written.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--limit", "-L", type=float)
    parser.add_argument("--output_path", "-o", type=Path)
    try:
        given, _ = parser.parse_known_args(list(args))
    except argparse.ArgumentError:  # The harness says what it can't read.
        return
    if given.limit is not None and not given.limit > 0:
        raise ConfigError(
            "--limit must be a number of questions, or a share of them below 1: greater than 0, got"
            f" {given.limit:g}"
        )
    if given.output_path is None:
        return
    folder = given.output_path.parent if given.output_path.suffix else given.output_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--output_path {str(given.output_path)!r} can't be written: {error.strerror}"
        ) from error
