"""LLM: prompts in, RequestOutputs out. The offline API, one class.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

It puts the parts together and holds the loop of a call: `PromptReader` reads prompts, `LLMEngine`
queues and steps them, `OutputBuilder` makes outputs of them. The engine decides what runs when,
`Calls` which call runs; it also clears away what an abandoned stream has left.
Special: llm_calls.py (chat, beam search, tables, vLLM's names, bars).
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
from nanoengine.forked import require_unforked
from nanoengine.llm_calls import OtherCalls, check_lora, progress_bar, refused_output
from nanoengine.locking import Calls
from nanoengine.outputs import OutputBuilder, OutputKind, RequestOutput
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.prompt_forms import Pause, Row, is_single_prompt, plain_column
from nanoengine.text.prompts import CheckedPrompt, OnError, PromptReader, RefusedPrompt
from nanoengine.text.tokenizer import Tokenizer

LOOK_AHEAD = 8
"""Prompts that a stream pulls beyond max_num_seqs: a row freed by a step is filled in the next."""

Prompt = str | Sequence[int] | Mapping[str, Any] | Row
"""One prompt; `text/prompt_forms.py` lists the forms."""


class LLM(OtherCalls):
    """A model loaded for offline inference.

    Args:
        model: directory of a Hugging Face checkpoint, a GGUF file, or a hub id.
        options: the fields of `EngineConfig`, and arguments of vLLM's that docs/moving_from_vllm.md
            lists; an unknown name raises ConfigError.

    Use it as a context manager, or call `close()`: both give all memory back. A process that was
    forked from one with an LLM can't have one: start processes by "spawn".

    Threads may share an LLM. `generate`, `chat` and `beam_search` run one after the other: a second
    thread waits until the first one's call has ended. A stream keeps nobody waiting: the next call,
    from whatever thread, cuts it off, and its iterator raises. `close()` ends all of them.
    """

    def __init__(self, model: str | PathLike[str], **options: Any) -> None:
        require_unforked()
        self.config = EngineConfig.from_kwargs(model=model, **options)
        with _no_collections():
            from nanoengine.build import build_engine  # Why here: it brings torch and numba.

            self._tokenizer = self._load_tokenizer()
            engine = build_engine(self.config, self._tokenizer)
        self._calls = Calls(engine)
        default_params = functools.partial(SamplingParams, **engine.info.generation_defaults)
        self._reader: PromptReader | None = PromptReader(
            self._tokenizer, engine.checker, default_params
        )
        self._state = f"{engine.info.dtype} on {engine.info.device}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.config.model!r}, {self._state})"

    def close(self) -> None:
        """Ends what runs and gives all memory back; closing twice is harmless.

        A call that runs in another thread raises NanoEngineError when its step has ended.
        """
        try:
            self._calls.close()
        finally:
            self._reader, self._tokenizer, self._state = None, None, "closed"

    # --- what was loaded ----------------------------------------------------------------------

    def open_reader(self) -> PromptReader:
        reader, _ = self._reader, self._calls.engine  # A closed LLM says so.
        assert reader is not None
        return reader

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a call without sampling_params uses: the values of the model's generation config.

        As in vLLM, max_tokens is 16 if the model says nothing else.
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
        """Completes prompts; one output a prompt, in their order.

        Args:
            prompts: one or many; a string, a list of token ids, a dict, or a Row, whose parameters
                and priority win over these (see `text/prompt_forms.py`).
            sampling_params: one for all or one each; None: `default_sampling_params`.
            use_tqdm: show a progress bar; or what makes one, with tqdm's keywords.
            lora_request: None; there for scripts that say so.
            priority: one for all or one each, lower runs first; None: that of sampling_params.
            on_error: "raise" checks all prompts before any runs and names the bad one; "record"
                gives a bad prompt an output with finish_reason "error" and runs the others. A
                request that fails while it runs is recorded in both, so that no neighbour's work is
                lost.

        Raises:
            RequestError, PromptTooLongError, CapacityError: a prompt can't run (on_error="raise").
            NanoEngineError: this LLM is closed.
        """
        if lora_request is not None:
            check_lora(lora_request)
        with self._calls.alone():
            read = self.open_reader().read_all(prompts, sampling_params, priority, on_error)
            outputs: list[RequestOutput | None] = [None] * len(read)
            with closing(self._run(read, kind="final", progress=use_tqdm)) as running:
                for output in running:
                    outputs[output.index] = output
        return [output for output in outputs if output is not None]

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
        """Yields outputs as they finish or grow; `output.index` says which prompt they belong to.

        A list of prompts is checked before anything runs, as in `generate`. Any other iterable is
        pulled lazily, at most max_num_seqs + LOOK_AHEAD prompts ahead of the last finished one: a
        job of any length runs in bounded memory. Its prompts are checked as they are pulled, and
        share one SamplingParams, unless they are Rows with their own. An iterator that has no
        prompt at present yields `text.prompt_forms.PAUSE`, so that those that run go on.

        Closing the iterator aborts what is left. So does any other call on this LLM, be it from
        another thread or from the generator of prompts; the iterator then raises instead of ending
        early. A request that is aborted, by `engine.abort(output.request_id)`, say, has an output
        with finish_reason "abort".

        Args:
            kind: "final" yields each request once, when it has finished; "cumulative" whenever it
                has new tokens, with all text so far; "delta" the same, with only what is new: the
                concatenated texts of a completion are its final text.
            use_tqdm: as in `generate`; the total of prompts that are pulled lazily is unknown.
        """
        if kind not in get_args(OutputKind):
            allowed = ", ".join(map(repr, get_args(OutputKind)))
            raise RequestError(f"kind must be one of {allowed}, got {kind!r}")

        from nanoengine.text.lazy_prompts import read_lazily

        prompts = plain_column(prompts)  # type: ignore[assignment]
        asked = (prompts, sampling_params, priority, on_error)
        read: Iterable[CheckedPrompt | RefusedPrompt | Pause]
        if is_single_prompt(prompts) or isinstance(prompts, Sequence):
            read = self.open_reader().read_all(*asked)
        else:
            read = read_lazily(self.open_reader(), *asked)
        return self._run(read, kind=kind, progress=use_tqdm)

    # --- the loop -----------------------------------------------------------------------------

    def _run(
        self,
        read: Iterable[CheckedPrompt | RefusedPrompt | Pause],
        *,
        kind: OutputKind,
        progress: bool | Callable[..., Any],
    ) -> Generator[RequestOutput, None, None]:
        """Queues prompts, steps the engine, yields outputs.

        A list is queued at once, for the scheduler to see all of it; an iterator as room appears.
        """
        call = self._calls.begin()
        limit, total = self.config.max_num_seqs + LOOK_AHEAD, None
        if isinstance(read, list):
            limit, total = len(read), sum(isinstance(one, CheckedPrompt) for one in read)
        waiting, running = iter(read), dict[str, OutputBuilder]()
        bar = nullcontext() if progress is False else progress_bar(progress, call.engine, total)
        with bar, call:
            while True:
                # Why without the lock: an iterator of the caller's may do anything.
                new, pause = [], None
                for one in itertools.islice(waiting, limit - len(running)):
                    if isinstance(one, Pause):
                        pause = one
                        break
                    new.append(one)
                outputs = [
                    refused_output(next(self._calls.request_ids), one)
                    for one in new
                    if isinstance(one, RefusedPrompt)
                ]
                with call.held_engine() as engine:
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
def _no_collections() -> Iterator[None]:
    """Pauses garbage collection: while libraries and kernels load, objects are only added.

    Perf: 0.35 of 2.35 CPU seconds to the first token of the demo model, Zen 3.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()  # Why both: what has been loaded is old now, and was not walked for it.
            gc.unfreeze()
        if was_enabled:
            gc.enable()
