"""usage: nanoengine eval MODEL --tasks TASK [TASK ...] [options of lm-eval run]

Scores MODEL (a .gguf file, a directory, a hub id, or demo) with lm-evaluation-harness.

  nanoengine eval demo --tasks my_task --include_path tasks/
  nanoengine eval Qwen/Qwen3-0.6B --tasks arc_easy hellaswag --num_fewshot 5
  nanoengine eval model-Q4_K_M.gguf --tasks gsm8k --apply_chat_template
  nanoengine eval ./model --tasks gsm8k --model_args quantization=int8,kv_cache_dtype=int8

Fields of EngineConfig go into --model_args; `lm-eval run --help` shows the other options.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.cli.options import model_path
from nanoengine.errors import ConfigError


def main(args: Sequence[str]) -> int:
    """Runs the harness; returns the exit status."""
    model, *rest = args
    if model.startswith("-"):
        raise ConfigError(f"MODEL must be the first argument of nanoengine eval, got {model!r}")
    if "," in model or "=" in model:
        raise ConfigError(f"MODEL must not contain ',' or '=' for lm-eval, got {model!r}")
    from nanoengine.bench import evaluation

    return evaluation.run(model_path(model), rest)
