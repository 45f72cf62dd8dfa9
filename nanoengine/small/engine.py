"""LLMEngine: the loop. `schedule` plans, `launch` computes, `commit` appends the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanoengine.core.interfaces import Executor
from nanoengine.core.plan import StepPlan
from nanoengine.core.sequence import fork_seed
from nanoengine.errors import CapacityError, PromptTooLongError, RequestError
from nanoengine.settings.params import SamplingParams
from nanoengine.small.scheduler import Scheduler
from nanoengine.small.sequence import Sequence

Tokens = SequenceOf[int]
SUPPORTED = (
    "n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos",
    "stop_token_ids",
)  # fmt: skip
"""Fields of SamplingParams that this engine supports; others must have their defaults."""


@dataclass(eq=False)
class LLMEngine:
    """Adds requests, and runs steps until they are finished.

    Attributes:
        executor: runs plans; the `ModelRunner` of this package or of the large engine.
        scheduler: creates plans.
        max_model_len: maximum number of tokens of prompt and output together.
        eos_token_ids: tokens that end an answer.
        watch: called with each plan before it runs.
    """

    executor: Executor
    scheduler: Scheduler
    max_model_len: int
    eos_token_ids: Tokens = ()
    watch: Callable[[StepPlan], None] | None = None
    _seq_ids: Iterator[int] = field(default_factory=itertools.count, init=False)

    def add_requests(self, prompts: Iterable[Tokens], params: SamplingParams) -> list[Sequence]:
        """Queues all prompts or none; returns their sequences, n per prompt.

        Raises:
            RequestError: a prompt is empty, or a parameter is not supported here.
            PromptTooLongError: there is no space for a token of an answer.
            CapacityError: prompt and answer together don't fit the pool.
        """
        if params != SamplingParams(**{name: getattr(params, name) for name in SUPPORTED}):
            raise RequestError(f"only {', '.join(SUPPORTED)} are supported here, got {params}")
        # Why n sequences: they share the prompt's full blocks through the prefix cache, as in vLLM.
        sequences = [self._check(prompt, params, i) for prompt in prompts for i in range(params.n)]
        self.scheduler.waiting += sequences
        return sequences

    def _check(self, prompt: Tokens, params: SamplingParams, index: int) -> Sequence:
        """The index-th sequence of a prompt, with its own seed."""
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; max_model_len={self.max_model_len} allows"
                f" {self.max_model_len - 1} plus one generated token"
            )
        limit = min(self.max_model_len, len(prompt) + (params.max_tokens or self.max_model_len))
        manager = self.scheduler.block_manager
        # Why - 1: the last sampled token is never computed.
        needed, usable = manager.num_blocks_for(limit - 1), len(manager.pool.ref_counts) - 1
        if needed > usable:
            raise CapacityError(
                f"{len(prompt)} prompt tokens and {limit - len(prompt)} output tokens need {needed}"
                f" KV blocks, but the pool has {usable}: raise num_blocks or lower max_tokens"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = frozenset([*eos, *(params.stop_token_ids or ())])
        seq_id = next(self._seq_ids)
        seed = fork_seed(seq_id if params.seed is None else params.seed, index)
        return Sequence(seq_id, list(prompt), len(prompt), params, limit, stop_ids, seed)

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that finished in it."""
        plan = self.scheduler.schedule()
        if self.watch is not None:
            self.watch(plan)
        return self.scheduler.commit(self.executor.launch(plan).result())

    def run(self) -> None:
        """Runs steps until all sequences are finished."""
        while self.scheduler.has_unfinished:
            self.step()
