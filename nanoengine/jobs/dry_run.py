"""`nanoengine batch --dry-run`: reads and checks all rows, counts tokens, and writes no file.

    rows ── RowReader ── chat template, tokenizer, limits, grammars ── one line per failing row
                                                                    └─ tokens of the others

It finds rows that can't run, in seconds and without weights. It can't find prompts that don't fit
into the KV cache, or failures while rows run. `cli/batch.py` calls it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.find import resolve_model
from nanoengine.core.requests import RequestChecker
from nanoengine.features.logits_processors import LogitsProcessors
from nanoengine.jobs.job import JobOptions, count_rows, tasks_of
from nanoengine.jobs.paths import JobPaths
from nanoengine.jobs.rows import RowReader, reader_args
from nanoengine.jobs.source import RowError, find_inputs
from nanoengine.settings.checks import counted
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.load_tokenizer import with_tokenizer_eos
from nanoengine.text.prompt_forms import PAUSE
from nanoengine.text.prompts import PromptReader, RefusedPrompt
from nanoengine.text.tokenizer import Tokenizer


def dry_run(options: JobOptions, config: EngineConfig, model: str) -> int:
    """Prints the rows that would fail, and the totals; returns 1 if a row would fail, else 0.

    Raises:
        ConfigError: the job itself would raise it too.
    """
    is_job_file = JobPaths(options.output, options.errors, options.summary_json).is_job_file
    inputs = find_inputs(options.inputs, options.input_format, is_job_file)
    count_rows(inputs, options)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.of(config)
    model_config = with_tokenizer_eos(load_model_config(resolve_model(config)), tokenizer)
    limits: Any = SimpleNamespace(
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=model_config.context_len(config.max_model_len),
        generation_defaults=model_config.generation_defaults,
    )
    blocks: Any = SimpleNamespace(can_ever_allocate=lambda num_tokens: True)
    checker = RequestChecker(limits, blocks, LogitsProcessors(config, model_config))
    prompts = PromptReader(tokenizer, checker, SamplingParams)
    reader = RowReader(options, *reader_args(model, config, limits, lambda: prompts.tokenizer))
    num_rows = num_failed = num_prompt = longest = num_output = 0
    for task in tasks_of(inputs, options, reader):
        if task is PAUSE:
            continue
        num_rows += 1
        error = task.error
        for prompt in (task.parts or [task.prompt]) if error is None else ():
            read = prompts.read(0, prompt, task.params, None, "record")
            if isinstance(read, RefusedPrompt):
                error = RowError("invalid_request", read.message)
                break
            count = len(read.request.prompt_token_ids)
            num_prompt, longest = num_prompt + count, max(longest, count)
            num_output += task.params.n * (read.request.max_num_tokens - count)
        if error is not None:
            num_failed += 1
            print(f"{task.input.name}:{task.number}: {error.code}: {error}")
    total = f"{counted(num_rows, 'row')}, {num_failed:,} would fail; {num_prompt:,} prompt tokens,"
    longest_prompt = f"at most {longest:,} per prompt"
    print(total, f"{longest_prompt}; at most {num_output:,} output tokens", file=sys.stderr)
    return 1 if num_failed else 0
