"""LLM: prompts in, RequestOutputs out. The offline API, one class.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

It turns prompts into token ids, drives `LLMEngine.step()` until its requests are done, and turns
tokens back into text. It decides nothing about what runs when: that is the engine's. One call runs
at a time, and leaves nothing behind however it ends.

    generate, chat, beam_search   hold `_calls` from beginning to end: a second thread waits
    stream                        holds nothing between two outputs: the next call cuts it off
    each turn of their loops      holds the engine's lock, and sees that its call is the latest
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, get_args

from nanoengine.config import EngineConfig
from nanoengine.core.sequence import OutputFollower, Request
from nanoengine.engine import EngineInfo, EngineStats, LLMEngine, require_unforked
from nanoengine.errors import CapacityError, NanoEngineError, RequestError
from nanoengine.features.beam import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSequence
from nanoengine.inputs import (
    PromptInput,
    Row,
    conversation_list,
    each_params,
    each_priority,
    has_parts,
    is_single_prompt,
    join_parts,
    parse_prompt,
    plain_column,
    prompt_list,
    takes_parts,
)
from nanoengine.observe.progress import ProgressBar
from nanoengine.outputs import OutputBuilder, OutputKind, RequestOutput, error_output
from nanoengine.sampling_params import SamplingParams
from nanoengine.tokenizer import TextStream, Tokenizer
from nanoengine.vllm_names import LLM_METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOK_AHEAD = 8
"""Prompts that a stream pulls beyond max_num_seqs: a row freed by a step is filled in the next."""

MAX_TEMPLATES = 64
"""Chat templates of which is remembered what content they take."""

Prompt = str | Sequence[int] | Mapping[str, Any] | Row
"""One prompt; `inputs.py` lists the forms."""

OnError = Literal["raise", "record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked prompt, ready to be queued."""

    index: int
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int | None
    key: str | None
    cache_salt: str | None
    bad_word_ids: tuple[tuple[int, ...], ...]


class LLM:
    """A model loaded for offline inference.

    Args:
        model: directory of a Hugging Face checkpoint, or a hub id.
        options: the fields of `EngineConfig`, and arguments of vLLM's that docs/moving_from_vllm.md
            lists; an unknown name raises ConfigError.

    Use it as a context manager, or call `close()`: both give all memory back. A process that is
    forked from one with an LLM can have none: start processes by "spawn".

    Threads may share an LLM. `generate`, `chat` and `beam_search` run one after the other: a second
    thread waits until the first one's call has ended. A stream keeps nobody waiting: the next call,
    from whatever thread, cuts it off, and its iterator raises. `close()` ends all of them.
    """

    def __init__(self, model: str | PathLike[str], **options: Any) -> None:
        require_unforked()
        self.config = EngineConfig.from_kwargs(model=model, **options)
        self._engine: LLMEngine | None = None
        self._calls = threading.RLock()
        with _no_collections():
            from nanoengine.build import build_engine  # Why here: it brings torch and numba.

            self._tokenizer = self._load_tokenizer()
            self._engine = build_engine(self.config)
        self._request_ids = itertools.count()
        self._call_numbers = itertools.count(1)
        self._call = 0  # the latest one
        self._takes_parts: dict[tuple[str | None, bool], bool] = {}  # by template

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        info = self._engine.info if self._engine is not None else None
        state = f"{info.dtype} on {info.device}" if info is not None else "closed"
        return f"LLM({self.config.model!r}, {state})"

    def __getattr__(self, name: str) -> NoReturn:
        """Called for what is not here: says why, where vLLM has it."""
        why = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
        raise AttributeError(f"LLM has no {name!r}{why}", name=name, obj=self)

    def close(self) -> None:
        """Ends what runs and gives all memory back; closing twice is harmless.

        A call that runs in another thread raises NanoEngineError when its step has ended.
        """
        engine, self._engine, self._tokenizer = self._engine, None, None
        if engine is not None:
            engine.close()

    # --- what was loaded ----------------------------------------------------------------------

    @property
    def engine(self) -> LLMEngine:
        """The engine underneath.

        Raises:
            NanoEngineError: this LLM is closed.
            EngineDeadError: this process was forked from the LLM's.
        """
        engine = self._engine
        if engine is None:
            raise NanoEngineError("this LLM is closed: its memory is given back; make a new one")
        engine.require_open()
        return engine

    @property
    def info(self) -> EngineInfo:
        """What was discovered at start: dtype, device, lengths, KV blocks, memory plan."""
        return self.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; its `backend` is the one of transformers.

        Raises:
            RequestError: this LLM was made with skip_tokenizer_init.
        """
        if self._tokenizer is None:
            _ = self.engine  # A closed LLM says so.
            raise RequestError(
                "text needs a tokenizer, and this LLM was made with skip_tokenizer_init=True:"
                " pass prompts as token ids, without stop strings or bad_words"
            )
        return self._tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a call without sampling_params uses: the values of the model's generation config.

        As in vLLM, max_tokens is 16 if the model says nothing else.
        """
        return SamplingParams(**self.info.generation_defaults)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers; vLLM's name for `tokenizer.backend`."""
        return self.tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name for `default_sampling_params`."""
        return self.default_sampling_params

    def stats(self) -> EngineStats:
        """Counters since the start: tokens, cache hits, preemptions, blocks."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; refuses (False) while blocks are in use."""
        return self.engine.reset_prefix_cache()

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the cached content of those given KV blocks that nobody uses; returns how many."""
        return self.engine.evict(block_ids)

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
                and priority win over these (see `inputs.py`).
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
        _check_lora(lora_request)
        self._idle_engine()
        with self._calls:
            jobs = self._prepare_all(prompt_list(prompts), sampling_params, priority, on_error)
            outputs: list[RequestOutput | None] = [None] * len(jobs)
            with contextlib.closing(self._run(jobs, kind="final", progress=use_tqdm)) as running:
                for output in running:
                    outputs[output.index] = output
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answers conversations: renders each by the chat template, then as `generate`.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}, or a list of them.
                A content is a string, or a list of {"type": "text", "text": ...}, which a template
                that takes strings gets joined, a part a line.
            chat_template: Jinja source to use in place of the model's own.
            add_generation_prompt: end the prompt with what begins an answer.
            continue_final_message: leave the last message open and continue it; needs
                add_generation_prompt=False.
            tools: descriptions of functions, as the template expects them.
            chat_template_kwargs: variables of the template's own, such as enable_thinking.

        Raises:
            RequestError: the tokenizer has no chat template, or it refuses the messages.
        """
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self.generate(
            [{"messages": one, **options} for one in conversation_list(messages)],
            sampling_params,
            use_tqdm,
            lora_request,
            priority=priority,
            on_error=on_error,
        )

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
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
        share one SamplingParams, unless they are Rows with their own.

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
        prompts = plain_column(prompts)  # type: ignore[assignment]
        if is_single_prompt(prompts) or isinstance(prompts, Sequence):
            jobs: Iterable[Job | RequestOutput] = self._prepare_all(
                prompt_list(prompts), sampling_params, priority, on_error
            )
        else:
            jobs = self._prepare_lazily(prompts, sampling_params, priority, on_error)
        return self._run(jobs, kind=kind, progress=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[BeamSearchOutput]:
        """The beam_width best continuations of each prompt, searched side by side.

        Tokens and scores are those of transformers' `generate(num_beams=beam_width,
        do_sample=False)` with the same settings.

        Args:
            prompts: as in `generate`.

        Raises:
            RequestError, PromptTooLongError, CapacityError: a prompt can't run, or max_num_seqs is
                below the beam width.
            NanoEngineError: this LLM is closed.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        _check_lora(lora_request)
        room = self.config.max_num_seqs // params.beam_width
        if not room:
            raise RequestError(
                f"beam_width={params.beam_width} sequences run together:"
                f" max_num_seqs={self.config.max_num_seqs} must be at least that"
            )
        self._idle_engine()
        with self._calls:
            jobs = self._prepare_all(prompt_list(prompts), SamplingParams(), None, "raise")
            waiting = [job for job in jobs if isinstance(job, Job)][::-1]
            outputs: dict[int, BeamSearchOutput] = {}
            engine, call = self._begin_call()
            with self._progress(use_tqdm, len(jobs)), self._ending(engine, call):
                running: dict[str, tuple[Job, BeamSearch, Request]] = {}
                while waiting or running:
                    with engine.turn():
                        self._require_current(call)
                        while waiting and len(running) < room:  # more would only wait for rows
                            search, request = self._start_search(waiting[-1], params)
                            running[request.request_id] = (waiting.pop(), search, request)
                        for request_id in _step(engine, running):
                            job, search, request = running.pop(request_id)
                            outputs[job.index] = self._beam_output(job, search, request)
        return [outputs[job.index] for job in jobs]

    def _start_search(self, job: Job, params: BeamSearchParams) -> tuple[BeamSearch, Request]:
        info = self.info
        search = BeamSearch(
            params,
            max_tokens=min(params.max_tokens, info.max_model_len - len(job.token_ids)),
            eos_token_ids=() if params.ignore_eos else info.eos_token_ids,
            vocab_size=info.vocab_size,
        )
        request = self.engine.add_request(
            self._next_id(),
            job.token_ids,
            search.sampling_params,
            cache_salt=job.cache_salt,
            chooser=search,
        )
        return search, request

    def _beam_output(self, job: Job, search: BeamSearch, request: Request) -> BeamSearchOutput:
        tokenizer, error = self._tokenizer, request.error
        if any(seq.finish_reason == "abort" for seq in request.sequences):
            error = "the search was aborted"
        sequences = [
            BeamSequence(
                token_ids=token_ids,
                text=tokenizer.output_text(
                    token_ids,
                    job.params,
                    prompt_token_ids=job.token_ids,
                    end_ids=search.eos_token_ids,
                )
                if tokenizer is not None
                else "",
                cumulative_logprob=logprob,
                score=score,
                finish_reason=reason,
            )
            for score, logprob, token_ids, reason in search.hypotheses
        ]
        return BeamSearchOutput(
            index=job.index,
            prompt=job.text,
            prompt_token_ids=job.token_ids,
            sequences=[] if error else sequences,
            error=error,
        )

    # --- prompts to jobs ----------------------------------------------------------------------

    def _load_tokenizer(self) -> Tokenizer | None:
        from nanoengine.build import resolve_model

        config = self.config
        if config.skip_tokenizer_init:
            return None
        if config.tokenizer is not None:
            return Tokenizer.load(config.tokenizer, trust_remote_code=config.trust_remote_code)
        directory = resolve_model(config)
        return Tokenizer.load(str(directory), trust_remote_code=config.trust_remote_code)

    def _prepare_all(
        self,
        prompts: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        on_error: OnError,
    ) -> list[Job | RequestOutput]:
        _check_on_error(on_error)
        count = len(prompts)
        params = each_params(sampling_params, count, lambda: self.default_sampling_params)
        priorities = each_priority(priority, count)
        return [
            self._prepare(i, *one, on_error)
            for i, one in enumerate(zip(prompts, params, priorities, strict=True))
        ]

    def _prepare_lazily(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        on_error: OnError,
    ) -> Iterator[Job | RequestOutput]:
        _check_on_error(on_error)
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be an iterable, got {type(prompts).__name__}")
        if isinstance(sampling_params, Sequence) or isinstance(priority, Sequence):
            raise RequestError(
                "prompts that are pulled lazily have no known number, so they share one"
                " SamplingParams and one priority: yield Row(prompt, sampling_params=...) to give"
                " one each"
            )
        (params,) = each_params(sampling_params, 1, lambda: self.default_sampling_params)
        (rank,) = each_priority(priority, 1)
        return (self._prepare(i, one, params, rank, on_error) for i, one in enumerate(prompts))

    def _prepare(
        self,
        index: int,
        prompt: object,
        params: SamplingParams,
        priority: int | None,
        on_error: OnError,
    ) -> Job | RequestOutput:
        """Checks one prompt; a bad one raises with its index, or becomes its output."""
        key: str | None = None
        if isinstance(prompt, Row):
            params = params if prompt.sampling_params is None else prompt.sampling_params
            priority = priority if prompt.priority is None else prompt.priority
            key, prompt = prompt.key, prompt.prompt
        text: str | None = None
        token_ids: list[int] = []
        try:
            given = parse_prompt(prompt)
            text, token_ids = self._encode(given)
            if params.stop or params.bad_words:
                _ = self.tokenizer
            job = Job(
                index=index,
                text=text,
                token_ids=token_ids,
                params=params,
                priority=priority,
                key=key,
                cache_salt=given.cache_salt,
                bad_word_ids=self.tokenizer.bad_word_ids(params.bad_words)
                if params.bad_words
                else (),
            )
            self.engine.check_request(
                job.token_ids,
                job.params,
                priority=job.priority,
                key=job.key,
                cache_salt=job.cache_salt,
                bad_word_ids=job.bad_word_ids,
            )
            return job
        except (RequestError, CapacityError) as error:
            kind, message, cause = type(error), str(error), error.__cause__
        except NanoEngineError:
            raise  # Why: the LLM itself is closed or dead.
        except Exception as error:  # Why: what a row holds runs code, of Jinja's or its own.
            kind, message, cause = RequestError, f"{type(error).__name__}: {error}", error
        if on_error == "raise":
            raise kind(f"prompt {index}: {message}") from cause
        return error_output(self._next_id(), index, text, token_ids, message, key=key)

    def _encode(self, given: PromptInput) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt; the text is None if only ids were given."""
        if given.token_ids is not None:
            return given.text, given.token_ids
        if given.messages is None:
            return given.text, self.tokenizer.encode(given.text or "")
        text = self._render(given.messages, dict(given.template_args))
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt of a conversation; parts of text reach the template in the form it takes."""
        variables = options.pop("chat_template_kwargs", {})
        render = self.tokenizer.render_chat
        if has_parts(messages):
            kind = {key: options[key] for key in ("chat_template", "tools") if key in options}
            key = (kind.get("chat_template"), bool(kind.get("tools")))
            if key not in self._takes_parts:
                if len(self._takes_parts) >= MAX_TEMPLATES:
                    self._takes_parts.clear()
                self._takes_parts[key] = takes_parts(lambda m: render(m, **kind, **variables))
            if not self._takes_parts[key]:
                messages = join_parts(messages)
        return render(messages, **options, **variables)

    # --- the loop -----------------------------------------------------------------------------

    def _run(
        self,
        jobs: Iterable[Job | RequestOutput],
        *,
        kind: OutputKind,
        progress: bool | Callable[..., Any] = False,
    ) -> Generator[RequestOutput, None, None]:
        """Queues jobs, steps the engine, yields outputs.

        A list is queued at once, for the scheduler to see all of it; an iterator as room appears.
        """
        engine, call = self._begin_call()
        limit = len(jobs) if isinstance(jobs, list) else self.config.max_num_seqs + LOOK_AHEAD
        total = sum(isinstance(job, Job) for job in jobs) if isinstance(jobs, list) else None
        waiting, running = iter(jobs), dict[str, OutputBuilder]()
        with self._progress(progress, total), self._ending(engine, call):
            while True:
                # Why outside the lock: an iterator of the caller's may do anything.
                new = list(itertools.islice(waiting, limit - len(running)))
                outputs = [job for job in new if isinstance(job, RequestOutput)]
                with engine.turn():
                    self._require_current(call)
                    for job in new:
                        if isinstance(job, Job):
                            builder = self._queue(job, kind)
                            running[builder.request.request_id] = builder
                    outputs += [running.pop(i).build() for i in _step(engine, running)]
                    if kind != "final":
                        outputs += [b.build() for b in running.values() if b.has_grown()]
                if not new and not outputs and not running:
                    return
                for output in outputs:
                    yield output
                    self._require_current(call)

    @contextlib.contextmanager
    def _progress(self, progress: bool | Callable[..., Any], total: int | None) -> Iterator[None]:
        """Shows a bar of `total` requests, if asked for; None: nobody knows how many."""
        if not progress:
            yield
            return
        engine, make_bar = self.engine, progress if callable(progress) else None
        bar = ProgressBar(total, engine.scheduler, make_bar=make_bar)
        engine.observers.append(bar)
        try:
            yield
        finally:
            engine.observers.remove(bar)
            bar.close()

    def _begin_call(self) -> tuple[LLMEngine, int]:
        """Ends what an abandoned stream left running; its iterator may live on in a traceback."""
        engine = self._idle_engine()
        with self._calls:
            # Why first: a stream in another thread sees it at its next turn, and lets go.
            call = self._call = next(self._call_numbers)
            engine.abort_all()
        return engine, call

    def _idle_engine(self) -> LLMEngine:
        """The engine, for a call that is about to wait for `_calls`.

        Why first: a forked child may find that locked for ever, and so may a progress bar that
        makes a call, whose step everybody waits for.
        """
        engine = self.engine
        engine.require_idle()
        return engine

    @contextlib.contextmanager
    def _ending(self, engine: LLMEngine, call: int) -> Iterator[None]:
        """However a call ends, none of its requests stays; those of a later call are left alone."""
        try:
            yield
        finally:
            if call == self._call:  # Why before: what is cut off need not wait for who cut it off.
                with engine.turn():
                    if call == self._call:
                        engine.abort_all()

    def _require_current(self, call: int) -> None:
        _ = self.engine  # A closed LLM says so.
        if call != self._call:
            raise NanoEngineError(
                "this stream was cut off: another call ran on the same LLM; finish or close a"
                " stream before the next call"
            )

    def _queue(self, job: Job, kind: OutputKind) -> OutputBuilder:
        params, tokenizer = job.params, self._tokenizer
        eos = () if params.ignore_eos else self.info.eos_token_ids
        end_ids = frozenset(eos) | frozenset(params.stop_token_ids or ())

        def make_follower(index: int) -> OutputFollower | None:
            if tokenizer is None or not params.detokenize:
                return None
            return TextStream(tokenizer, params, prompt_token_ids=job.token_ids, end_ids=end_ids)

        request = self.engine.add_request(
            self._next_id(),
            job.token_ids,
            params,
            priority=job.priority,
            key=job.key,
            cache_salt=job.cache_salt,
            bad_word_ids=job.bad_word_ids,
            make_follower=make_follower if params.stop or kind != "final" else None,
        )
        return OutputBuilder(
            request,
            index=job.index,
            key=job.key,
            prompt=job.text,
            tokenizer=tokenizer,
            end_ids=end_ids,
            kind=kind,
        )

    def _next_id(self) -> str:
        return str(next(self._request_ids))


@contextlib.contextmanager
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


def _check_on_error(on_error: object) -> None:
    if on_error not in get_args(OnError):
        raise RequestError(f"on_error must be 'raise' or 'record', got {on_error!r}")


def _check_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError(
            f"lora_request must be None: no adapter is applied, got {lora_request!r}"
        )


def _step(engine: LLMEngine, running: Collection[str]) -> list[str]:
    """Runs a step; which of the requests `running` have ended, by it or otherwise.

    Requests vanish otherwise when somebody aborts them, or has taken the step that ended them.
    """
    ended = []
    if engine.has_unfinished():
        ended = [r.request_id for r in engine.step() if r.request_id in running]
    if engine.num_unfinished != len(running) - len(ended):
        ended = [request_id for request_id in running if not engine.is_unfinished(request_id)]
    return ended
