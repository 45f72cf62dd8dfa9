"""LLM: the offline API, from prompts to RequestOutputs.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

It combines the parts and runs the loop of a call: `PromptReader` reads prompts, `LLMEngine` queues
and steps them, `OutputBuilder` creates outputs. The engine decides which request runs when, and
`Calls` which call runs; `Calls` also aborts the requests of an abandoned stream.
See also llm_mixins.py (chat, beam search, datasets, vLLM's names, progress bars).
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from os import PathLike
from typing import Any, Self, get_args

from nanoengine.core.engine_stats import EngineStats
from nanoengine.core.sequence import OutputFollower
from nanoengine.engine import LLMEngine
from nanoengine.errors import RequestError
from nanoengine.fork_guard import require_unforked
from nanoengine.llm_mixins import LLMMixin, check_lora, error_output, progress_bar
from nanoengine.locking import Calls
from nanoengine.outputs import OutputBuilder, OutputKind, RequestOutput
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.prompt_forms import Pause, Row, is_single_prompt, plain_column
from nanoengine.text.prompts import CheckedPrompt, OnError, PromptReader, RefusedPrompt
from nanoengine.text.tokenizer import Tokenizer

LOOK_AHEAD = 8
"""Prompts that a stream reads beyond max_num_seqs: a row freed by a step is filled in the next."""

Prompt = str | Sequence[int] | Mapping[str, Any] | Row
"""One prompt; `text/prompt_forms.py` lists the types."""


class LLM(LLMMixin):
    """A model loaded for offline inference.

    Args:
        model: directory of a Hugging Face checkpoint, a GGUF file, or a hub id.
        options: the fields of `EngineConfig`, and the vLLM arguments listed in
            docs/moving_from_vllm.md; an unknown name raises ConfigError.

    Use it as a context manager, or call `close()`; both free all memory. A process that was forked
    from one with an LLM can't create one: start processes with "spawn".

    Threads may share an LLM. `generate`, `chat` and `beam_search` run one after the other: a second
    thread waits until the first one's call has ended. A stream does not block other calls: the next
    call, from any thread, ends it, and its iterator raises. `close()` ends all of them.
    """

    def __init__(self, model: str | PathLike[str], **options: Any) -> None:
        require_unforked()
        self.config = EngineConfig.from_kwargs(model=model, **options)
        with _gc_paused():
            from nanoengine.build import build_engine  # Why here: it imports torch and numba.

            self._tokenizer = self._load_tokenizer()
            engine = build_engine(self.config, self._tokenizer)
        self._calls = Calls(engine)
        default_params = functools.partial(SamplingParams, **engine.info.generation_defaults)
        self._reader: PromptReader | None = PromptReader(
            self._tokenizer, engine.checker, default_params
        )
        self._state = f"{engine.info.dtype} on {engine.info.device}"
        self._enqueued = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.config.model!r}, {self._state})"

    def close(self) -> None:
        """Ends running calls and frees all memory; closing twice has no effect.

        A call that runs in another thread raises NanoEngineError after its current step.
        """
        try:
            self._calls.close()
        finally:
            self._reader, self._tokenizer, self._state = None, None, "closed"

    # --- what was loaded ----------------------------------------------------------------------

    def require_reader(self) -> PromptReader:
        reader, _ = self._reader, self._calls.engine  # Raises if the LLM is closed.
        assert reader is not None
        return reader

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without sampling_params, from the model's generation config.

        As in vLLM, max_tokens is 16 unless the model defines it.
        """
        return SamplingParams(**self.info.generation_defaults)

    def stats(self) -> EngineStats:
        """Counters since the start: tokens, cache hits, preemptions, blocks."""
        return self.engine.stats()

    def _load_tokenizer(self) -> Tokenizer | None:
        return None if self.config.skip_tokenizer_init else Tokenizer.of(self.config)

    # --- calls --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts; returns one output per prompt, in the same order.

        Args:
            prompts: one or many; a string, a list of token ids, a dict, or a Row, whose parameters
                and priority have precedence over these (see `text/prompt_forms.py`).
            sampling_params: one for all or one per prompt; None: `default_sampling_params`.
            use_tqdm: show a progress bar, or a function that creates one, with tqdm's keywords.
            lora_request: must be None; accepted for compatibility with vLLM.
            priority: one for all or one per prompt, lower runs first; None: from sampling_params.
            on_error: "raise" checks all prompts before any runs and names the invalid one; "record"
                returns an output with finish_reason "error" for an invalid prompt and runs the
                others. A request that fails while it runs is recorded in both cases, so that the
                results of the others are not lost.

        Raises:
            RequestError, PromptTooLongError, CapacityError: a prompt can't run (on_error="raise").
            NanoEngineError: this LLM is closed.
        """
        if lora_request is not None:
            check_lora(lora_request)
        with self._calls.exclusive_call():
            read = self.require_reader().read_all(prompts, sampling_params, priority, on_error)
            return self._complete(read, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt | Pause],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kind: OutputKind = "final",
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> Generator[RequestOutput, None, None]:
        """Yields outputs as they finish or grow; `output.index` is the index of the prompt.

        A list of prompts is checked before anything runs, as in `generate`. Any other iterable is
        read lazily, at most max_num_seqs + LOOK_AHEAD prompts ahead of the last finished one, so a
        job of any length needs bounded memory. Its prompts are checked when they are read, and
        share one SamplingParams, unless they are Rows with their own. An iterator without a prompt
        at the moment yields `text.prompt_forms.PAUSE`, so that running requests continue.

        Closing the iterator aborts the remaining requests. Any other call on this LLM, from another
        thread or from the generator of prompts, does so, too; the iterator then raises instead of
        ending early. An aborted request, for example by `engine.abort(output.request_id)`, has an
        output with finish_reason "abort".

        Args:
            kind: "final" yields each request once, when it has finished; "cumulative" whenever it
                has new tokens, with all text so far; "delta" the same with only the new part: the
                concatenated texts of a completion are its final text.
            use_tqdm: as in `generate`; the total of prompts that are read lazily is unknown.
        """
        if kind not in get_args(OutputKind):
            allowed = ", ".join(map(repr, get_args(OutputKind)))
            raise RequestError(f"kind must be one of {allowed}, got {kind!r}")

        from nanoengine.text.lazy_prompts import read_lazily

        prompts = plain_column(prompts)  # type: ignore[assignment]
        arguments = (prompts, sampling_params, priority, on_error)
        read: Iterable[CheckedPrompt | RefusedPrompt | Pause]
        if is_single_prompt(prompts) or isinstance(prompts, Sequence):
            read = self.require_reader().read_all(*arguments)
        else:
            read = read_lazily(self.require_reader(), *arguments)
        return self._run(read, kind=kind, progress=use_tqdm)

    # --- the loop -----------------------------------------------------------------------------

    def _complete(self, read: list[Any], progress: Any) -> list[RequestOutput]:
        """Runs prompts to their ends; returns the outputs in the order of the prompts."""
        with closing(self._run(read, kind="final", progress=progress)) as running:
            return sorted(running, key=lambda output: output.index)

    def _run(
        self,
        read: Iterable[CheckedPrompt | RefusedPrompt | Pause],
        *,
        kind: OutputKind,
        progress: bool | Callable[..., Any],
    ) -> Generator[RequestOutput, None, None]:
        """Queues prompts, steps the engine, yields outputs.

        A list is queued at once, for the scheduler to see all of it; an iterator as rows are freed.
        """
        call = self._calls.begin()
        limit, total = self.config.max_num_seqs + LOOK_AHEAD, None
        if isinstance(read, list):
            limit, total = len(read), sum(isinstance(prompt, CheckedPrompt) for prompt in read)
        waiting, running = iter(read), dict[str, OutputBuilder]()
        bar = nullcontext() if progress is False else progress_bar(progress, call.engine, total)
        with bar, call:
            while True:
                # Why without the lock: the caller's iterator may run any code.
                new, pause = [], None
                for prompt in itertools.islice(waiting, limit - len(running)):
                    if isinstance(prompt, Pause):
                        pause = prompt
                        break
                    new.append(prompt)
                outputs = [
                    error_output(next(self._calls.request_ids), prompt)
                    for prompt in new
                    if isinstance(prompt, RefusedPrompt)
                ]
                with call.locked_engine() as engine:
                    for prompt in new:
                        if isinstance(prompt, CheckedPrompt):
                            builder = self._queue(engine, prompt, kind)
                            running[builder.request.request_id] = builder
                    outputs += [running.pop(i).build() for i in call.step(running)]
                    if kind != "final":
                        outputs += [b.build() for b in running.values() if b.has_grown()]
                if not new and not outputs and not running and pause is not Pause.COMPILING:
                    return
                for output in outputs:
                    yield output
                    call.require_latest()

    def _queue(self, engine: LLMEngine, prompt: CheckedPrompt, kind: OutputKind) -> OutputBuilder:
        checked, params, tokenizer = prompt.request, prompt.request.params, self._tokenizer

        def make_follower(index: int) -> OutputFollower | None:
            if tokenizer is None or not params.detokenize:
                return None
            from nanoengine.text.stream import TextStream

            return TextStream(
                tokenizer,
                params,
                prompt_token_ids=checked.prompt_token_ids,
                end_ids=checked.stop_ids,
            )

        request = engine.queue(
            next(self._calls.request_ids),
            checked,
            make_follower=make_follower if params.stop or kind != "final" else None,
        )
        return OutputBuilder(request, prompt, tokenizer, kind)


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pauses garbage collection while libraries and kernels load, because nothing is freed then.

    Perf: 0.35 of 2.35 CPU seconds to the first token of the demo model, Zen 3.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()  # Why both: moves loaded objects to the old generation.
            gc.unfreeze()
        if was_enabled:
            gc.enable()
