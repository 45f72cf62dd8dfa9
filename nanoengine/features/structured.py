"""Structured outputs: a grammar restricts the next tokens, and determines when an output ends.

    StructuredOutputs ── check a prompt: compile in a thread, cached ──┐  outside the step
    admit a row ────── fork the compiled grammar ── accept its tokens <┘
    each step ──────── one bit per token, all rows in one call ── logits of other tokens: -inf
    complete ───────── only an EOS id is allowed: the sequence ends with "stop"

`Structured` is a `LogitsProcessor`, and a `Grammar` the state of a row. So grammars support forks,
preemption and drafts in the same way as penalties. A library implements `GrammarLibrary`
(`llguidance_grammars.py`); its tables of the tokenizer are built for the first grammar. Each rank
compiles its own grammars.

Compilation may take any time, and its stack grows with the nesting of the request. So a thread with
a large stack compiles; a waiting thread can be interrupted by Ctrl-C, and gives up after COMPILE_S.
Other rows continue to run: `is_ready` returns False while a prompt's grammar is being compiled.

Created by `build.py`. Legend: L rows of logits, V vocabulary size, W = ceil(V / 32) words per mask.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np
import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.core.plan import AdmittedSequence
from nanoengine.errors import RequestError
from nanoengine.runner.transfers import ship
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer

MAX_GRAMMARS = 1024
"""Number of compiled grammars in the LRU cache; evicted ones are compiled again."""

COMPILE_S = 10.0
"""Maximum compilation time [s]. A schema takes milliseconds."""

POLL_S = 0.1
"""Interval [s] at which a waiting thread wakes up. Why: a Ctrl-C just before the wait begins does
not interrupt it, and would only be handled at its end."""

QUICK_WAIT_S = 0.01
"""Time [s] for which a new grammar is waited for while other rows run."""

STACK_BYTES = 256 << 20
"""Stack size of a compiling thread; only used memory is allocated."""

_STACK_SIZE_LOCK = threading.Lock()  # Why: the stack size is a setting of the whole process.


class Grammar(Protocol):
    """A compiled grammar, and the position of a text in it: the `RowState` of a row, which may also
    have `forced_tokens` and an `error`."""

    def accept(self, token_id: int) -> None:
        """Adds the text's next token; an EOS id changes nothing.

        Raises:
            RequestError: the grammar does not allow it.
        """

    def fork(self) -> Self:
        """An independent copy."""


class GrammarLibrary(Protocol):
    """Compiles grammars for one tokenizer, and fills masks."""

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar at the start of a text.

        Raises:
            RequestError: it can't be compiled; the message contains the reason.
        """

    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray) -> None:
        """Sets the bits of tokens that may come next, and of EOS ids if the text may end.

        Args:
            masks: [L, W] int32, zeros; token t of row l is bit t % 32 of masks[l, t // 32].
                Undefined for a grammar with an `error`, whose text has exceeded the library's
                limits.
        """


class CompileJob:
    """A grammar that a thread compiles, or has compiled; since `began` [s, monotonic].

    Why no Future: Ctrl-C may interrupt a thread that holds the future's lock. The lock would then
    never be released, and the compiling thread could not set its result. Here it needs no lock for
    that.
    """

    began: float | None = None
    grammar: Grammar | None = None
    error: BaseException | None = None

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._running.acquire()

    def end(self, grammar: Grammar | None, error: BaseException | None = None) -> None:
        """Sets the result; called once."""
        self.grammar, self.error = grammar, error
        self._running.release()

    def done(self) -> bool:
        """Whether it has ended."""
        return self.grammar is not None or self.error is not None

    def remaining_s(self) -> float:
        """Remaining time [s]. The time to build the tokenizer's tables is not counted."""
        return COMPILE_S if self.began is None else self.began + COMPILE_S - time.monotonic()

    def wait(self, seconds: float) -> None:
        """Waits until it has ended, at most this long."""
        if not self.done() and self._running.acquire(timeout=max(seconds, 0)):
            self._running.release()


class Structured:
    """The logits processor of structured outputs.

    Args:
        make: creates the library, for the first grammar.
        vocab_size: V.
        eos_token_ids: ids that may follow a complete text.
    """

    def __init__(
        self, make: Callable[[], GrammarLibrary], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.make, self.vocab_size, self.eos_token_ids = make, vocab_size, tuple(eos_token_ids)
        # Per EOS id: its word of a mask, and its bit in the word.
        self._words = [token_id // 32 for token_id in self.eos_token_ids]
        self._bits = [
            np.uint32(1 << token_id % 32).view(np.int32) for token_id in self.eos_token_ids
        ]
        self._library: GrammarLibrary | None = None
        self._jobs: OrderedDict[StructuredOutputs, CompileJob] = OrderedDict()
        self._lock = threading.Lock()  # Why: prompts are checked while another thread steps.
        self._library_lock = threading.Lock()

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether `check` need not wait; if False, the compilation has started."""
        if not self.eos_token_ids:
            return True
        is_new = params.structured_outputs not in self._jobs
        job = self._get_job(params.structured_outputs)
        # Why wait at all: perhaps no other sequence runs.
        job.wait(QUICK_WAIT_S if is_new else QUICK_WAIT_S / 10)
        return job.done() or job.remaining_s() <= 0

    def check(self, params: SamplingParams) -> None:
        """Compiles the requested grammar, before the step that admits the request.

        Raises:
            RequestError: it can't be compiled, or not in time, or there is no EOS id to end it.
        """
        if not self.eos_token_ids:
            raise RequestError("structured_outputs require an EOS id, and the model has none")
        self._compile(params.structured_outputs)

    def admit(self, sequence: AdmittedSequence) -> Grammar | None:
        if sequence.params.structured_outputs is None:
            return None
        grammar = self._compile(sequence.params.structured_outputs).fork()
        for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
            grammar.accept(token_id)
        return grammar

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[Grammar]) -> None:
        masks, complete = self._fill_masks(states)
        banned = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little")
        (index, mask) = ship(
            logits.device, np.asarray(lines), banned[:, : self.vocab_size].view(bool)
        )
        if len(lines) == len(logits):  # Perf: the common case, without a copy of the logits
            logits.masked_fill_(mask, -torch.inf)
        else:
            logits[index] = logits[index].masked_fill(mask, -torch.inf)
        for i in complete:  # Why not by the mask: min_tokens may have banned it.
            logits[lines[i], self.eos_token_ids[0]] = 0.0

    def masks(self, states: Sequence[Grammar]) -> np.ndarray:
        """The allowed tokens, one bit each: [L, W] int32.

        After a complete text only the first EOS id is allowed.
        """
        return self._fill_masks(states)[0]

    def _fill_masks(self, states: Sequence[Grammar]) -> tuple[np.ndarray, np.ndarray]:
        """The masks, and the indices of complete texts."""
        masks = np.zeros((len(states), -(-self.vocab_size // 32)), np.int32)
        self._library.fill(states, masks)
        complete = may_end = np.flatnonzero(masks[:, self._words[0]] & self._bits[0])
        if len(may_end):
            rest = masks[may_end]
            for word, bit in zip(self._words, self._bits, strict=True):
                rest[:, word] &= ~bit
            complete = may_end[~rest.any(axis=1)]
            masks[complete] = 0
            masks[complete, self._words[0]] = self._bits[0]
        return masks, complete

    def _compile(self, spec: StructuredOutputs) -> Grammar:
        job = self._get_job(spec)
        while not job.done():
            if job.remaining_s() <= 0:  # The thread goes on, but MAX_CHARS bounds its time.
                raise RequestError(
                    f"structured_outputs can't be compiled: it takes longer than {COMPILE_S:g} s"
                )
            job.wait(min(job.remaining_s(), POLL_S))
        if job.grammar is None:
            raise job.error.with_traceback(None)  # Why: each raise would extend it.
        return job.grammar

    def _get_job(self, spec: StructuredOutputs) -> CompileJob:
        """The compilation of this request, which is started if necessary."""
        with self._lock:
            job = self._jobs.pop(spec, None)
            if job is None:
                job = self._start_job(spec)
                if len(self._jobs) >= MAX_GRAMMARS:
                    self._jobs.popitem(last=False)
            self._jobs[spec] = job
            return job

    def _start_job(self, spec: StructuredOutputs) -> CompileJob:
        job = CompileJob()

        def work() -> None:
            try:
                with self._library_lock:
                    library = self._library = self._library or self.make()
                job.began = time.monotonic()
                job.end(library.compile(spec))
            except BaseException as error:
                job.end(None, error)

        with _STACK_SIZE_LOCK:
            default_size = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=work, daemon=True).start()
            finally:
                threading.stack_size(default_size)
        return job


def make_structured(config: EngineConfig, model_config: ModelConfig) -> Structured:
    """The logits processor for a model."""
    vocab_size, eos_token_ids = model_config.vocab_size, tuple(model_config.eos_token_ids)
    make = functools.partial(_library, config, vocab_size, eos_token_ids)
    return Structured(make, vocab_size, eos_token_ids)


def _library(config: EngineConfig, vocab_size: int, eos_ids: tuple[int, ...]) -> GrammarLibrary:
    if config.skip_tokenizer_init:
        raise RequestError(
            "structured_outputs require the tokenizer, and this LLM was created with"
            " skip_tokenizer_init=True"
        )
    # Why here: an LLM that gets no such request doesn't load the library.
    from nanoengine.features.llguidance_grammars import LLGuidance

    return LLGuidance(Tokenizer.of(config), vocab_size, eos_ids)
