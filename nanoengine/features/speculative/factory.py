"""Creates the drafters: the one that `speculative` selects, and the one for grammars.

Called by `build.py`: before a runner is created if `speculative` is set, else when the first
request with a grammar arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.features.speculative.drafting import Drafter, Drafting
from nanoengine.features.speculative.grammar_drafts import GrammarDrafter
from nanoengine.features.speculative.mtp import MTPDrafter, MTPRunner
from nanoengine.features.speculative.ngram import NgramDrafter
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.speculative import MTPDrafts, NgramDrafts, parse_speculative


def speculative_executor(options: RunnerOptions, executor: Any) -> Callable[[RunnerOptions], Any]:
    """The runner's class if `speculative` is set: `executor`, or a runner that also drafts."""
    is_mtp = isinstance(parse_speculative(options.config.speculative), MTPDrafts)
    return MTPRunner if is_mtp else executor


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
    if isinstance(runner, ModelRunner):  # with ranks, grammars are only in the ranks
        drafter = GrammarDrafter(runner.ensure_step_sampler().sampler, drafter)
    elif drafts is None:
        return None
    return Drafting(drafter=drafter, overlapped=overlap)
