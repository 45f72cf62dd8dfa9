"""Creates the drafters: the one that `speculative` selects, and the one for grammars.

Called by `build.py`: before a runner is created if `speculative` is set, else when the first
request with a grammar arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.find import resolve_model
from nanoengine.checkpoint.quantization import resolve_quantization
from nanoengine.core.block_manager import BlockManager
from nanoengine.errors import ConfigError
from nanoengine.features.speculative.draft_model import DraftModel, DraftModelRunner
from nanoengine.features.speculative.drafting import Drafter, Drafting
from nanoengine.features.speculative.grammar_drafts import GrammarDrafter
from nanoengine.features.speculative.mtp import MTPDrafter, MTPRunner
from nanoengine.features.speculative.ngram import NgramDrafter
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.speculative import ModelDrafts, MTPDrafts, NgramDrafts, parse_speculative


def speculative_executor(options: RunnerOptions, executor: Any) -> Callable[[RunnerOptions], Any]:
    """The runner's class if `speculative` is set: `executor`, or a runner that also drafts."""
    drafts = parse_speculative(options.config.speculative)
    if isinstance(drafts, MTPDrafts):
        return MTPRunner
    if not isinstance(drafts, ModelDrafts):
        return executor
    return functools.partial(DraftModelRunner, draft=_make_draft_runner(drafts, options))


def _make_draft_runner(drafts: ModelDrafts, options: RunnerOptions) -> ModelRunner:
    """The draft model's runner, not started: the engine's settings with its own checkpoint."""
    overrides = {"kv_cache_gib": None, "memory_fraction": None, "num_kv_blocks": None}
    overrides |= {"speculative": None, "max_model_len": None}
    # Why eager: its steps are not plain decodes.
    config = replace(options.config, model=drafts.model, enforce_eager=True, **overrides)
    try:
        directory = resolve_model(config)
    except ConfigError as error:
        raise ConfigError(
            f"speculative is neither 'ngram', 'mtp' nor a draft model: {error}"
        ) from error
    model_config = load_model_config(directory)
    if model_config.states is not None:
        raise ConfigError(
            f"speculative: {model_config.architecture} can't be a draft model, because it has"
            " recurrent states; use 'ngram'"
        )
    at_load = (config.quantization or "").startswith("int")
    quantization = resolve_quantization(
        config.quantization if at_load else None,
        model_config.quantization,
        device=options.device.type,
    )
    resolved = {"model_config": model_config, "directory": directory, "quantization": quantization}
    return ModelRunner(replace(options, config=config, processors=tuple, **resolved))


def make_drafting(
    config: EngineConfig, runner: Any, manager: BlockManager, overlap: bool
) -> Drafting | None:
    """The drafter with its cost control; None if nothing can be drafted."""
    drafts = parse_speculative(config.speculative) if config.speculative else None
    # Why not with overlapped steps: a grammar's forced tokens need the previous step's tokens.
    if drafts is None and overlap:
        return None
    drafter = Drafter()
    if isinstance(drafts, NgramDrafts):
        drafter = NgramDrafter(drafts)
    elif isinstance(runner, MTPRunner):
        drafter = MTPDrafter(runner, manager, drafts.k)
    elif isinstance(runner, DraftModelRunner):
        drafter = DraftModel(runner, manager, drafts.k)
    if isinstance(runner, ModelRunner):  # with ranks, grammars are only in the ranks
        drafter = GrammarDrafter(runner.ensure_step_sampler().sampler, drafter)
    elif drafts is None:
        return None
    return Drafting(drafter=drafter, overlapped=overlap)
