"""LLMMixin: the methods of an LLM other than `generate` and `stream`.

    chat, beam_search, generate_dataset     built from `generate`, or from a feature
    enqueue, wait_for_completion            `generate` in two calls
    embed, score, classify, reward          use hidden states: features/pooling.py
    reset_prefix_cache                      drops cached prefixes
    load_weights                            replaces weights in place: features/new_weights.py
    get_tokenizer, ...                      vLLM's names

The base class of `LLM`, which has the loop. Each method imports the feature that it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from nanoengine.core.engine_stats import EngineInfo
from nanoengine.engine import LLMEngine
from nanoengine.errors import NanoEngineError, RequestError
from nanoengine.locking import Calls
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.prompts import CheckedPrompt, OnError, PromptReader, RefusedPrompt
from nanoengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoengine.features.beam import BeamSearchOutput, BeamSearchParams
    from nanoengine.features.pooled_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanoengine.features.pooling import PoolingTasks, PoolRequests
    from nanoengine.text.prompt_forms import Row

    Prompt = str | Sequence[int] | Mapping[str, Any] | Row


PAIR_OPTIONS = ("answers", "template", "chat_template")
"""Options of `score` that define how a pair of texts becomes a prompt."""


class LLMMixin:
    """The methods without a loop of their own."""

    config: EngineConfig
    _calls: Calls[LLMEngine]
    _tokenizer: Tokenizer | None
    _enqueued: list[tuple[str, CheckedPrompt | RefusedPrompt]]

    # Defined by `LLM`; they raise if it is closed.
    generate: Callable[..., list[RequestOutput]]
    stream: Callable[..., Generator[RequestOutput, None, None]]
    require_reader: Callable[[], PromptReader]
    _complete: Callable[..., list[RequestOutput]]

    @property
    def engine(self) -> LLMEngine:
        """The engine of this LLM.

        Raises:
            NanoEngineError: this LLM is closed.
            EngineDeadError: this process was forked from the LLM's process.
        """
        return self._calls.engine

    @property
    def info(self) -> EngineInfo:
        """What was determined at start: dtype, device, lengths, KV blocks, memory plan."""
        return self.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; its `backend` is the transformers tokenizer.

        Raises:
            RequestError: this LLM was created with skip_tokenizer_init.
        """
        return self.require_reader().tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer; vLLM's name for `tokenizer.backend`."""
        return self.tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name for `default_sampling_params`."""
        return self.default_sampling_params

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; returns False and keeps them while blocks are in use."""
        return self.engine.reset_prefix_cache()

    def load_weights(
        self, weights: str | PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]
    ) -> set[str]:
        """Replaces the model's weights; returns the names of the loaded tensors.

        Waits for calls of other threads. Running requests, for example of a stream, continue from
        their tokens with the new weights. Cached prefixes are dropped, and KV is computed again.

        Args:
            weights: a folder with a checkpoint of the same model, or (name, tensor) pairs such as
                `model.state_dict()` of transformers. Tensors of any floating dtype are converted to
                the engine's format, and quantized if the engine quantized at load. Tensors that are
                missing keep their values.

        Raises:
            WeightLoadError: a name, shape or dtype does not match, or this model's weights can't be
                replaced; nothing has changed.
            EngineDeadError: reading failed after the first tensor was written; the LLM is closed.
        """
        from nanoengine.features.new_weights import load_weights

        with self._calls.exclusive_call():
            return load_weights(self.engine, weights)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises for unknown names; for vLLM's names with the reason."""
        from nanoengine.settings.vllm_names import LLM_METHODS

        why = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
        raise AttributeError(f"LLM has no {name!r}{why}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise NanoEngineError("an LLM can't be copied or sent to another process: create one there")

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
        tool_choice: str | Mapping[str, Any] | None = None,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations: applies the chat template to each, then works like `generate`.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}, or a list of them.
                A content is a string, or a list of {"type": "text", "text": ...}. A template that
                takes strings gets the parts joined by newlines.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: end the prompt with the start of an answer.
            continue_final_message: leave the last message open and continue it; needs
                add_generation_prompt=False.
            tools: descriptions of functions, in the template's format.
            chat_template_kwargs: variables of the template, such as enable_thinking.
            tool_choice: "required", or {"type": "function", "function": {"name": ...}}: a grammar
                restricts each answer to calls of these tools.
            reasoning_parser, tool_call_parser: parse answers, with vLLM's names of parsers, or
                "auto" to select by the chat template: see `CompletionOutput`.

        Raises:
            RequestError: the tokenizer has no chat template, or it rejects the messages.
        """
        from nanoengine.text.prompt_forms import conversation_list

        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        form = None
        if (tool_choice, reasoning_parser, tool_call_parser) != (None, None, None):
            from nanoengine.features.output_parser import make_parser

            parsers = (reasoning_parser, tool_call_parser, tools, tool_choice)
            template = chat_template or self.tokenizer.chat_template
            form = make_parser(*parsers, lambda: template)
            params = sampling_params or self.default_sampling_params
            sampling_params = form.params(params) if form is not None else params
        outputs = self.generate(
            [{"messages": each, **options} for each in conversation_list(messages)],
            sampling_params,
            use_tqdm,
            lora_request,
            priority=priority,
            on_error=on_error,
        )
        return outputs if form is None else [form.parse(o, o.request_id) for o in outputs]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[str]:
        """Checks prompts, and keeps them until `wait_for_completion` runs all of them in one batch.
        Returns their request ids.

        The arguments are those of `generate`, in vLLM's order; no progress bar is shown here.

        Raises:
            RequestError, PromptTooLongError, CapacityError: a prompt can't run; none was added.
        """
        check_lora(lora_request)
        read = self.require_reader().read_all(prompts, sampling_params, priority, "raise")
        request_ids = list(itertools.islice(self._calls.request_ids, len(read)))
        self._enqueued.extend(zip(request_ids, read, strict=True))
        return request_ids

    def enqueue_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[str]:
        """Like `enqueue`, for conversations. `options` are those of the chat template in `chat`."""
        from nanoengine.text.prompt_forms import conversation_list

        prompts = [{"messages": each, **options} for each in conversation_list(messages)]
        return self.enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Runs all enqueued prompts; returns one output per prompt, in the order of the calls.

        Args:
            output_type: has no effect: all outputs have the same type.
        """
        with self._calls.exclusive_call():
            enqueued = self._enqueued[:]
            read = [dataclasses.replace(p, index=i) for i, (_, p) in enumerate(enqueued)]
            outputs = zip(enqueued, self._complete(read, use_tqdm), strict=True)
            del self._enqueued[: len(enqueued)]  # Why here: an interrupted call can be repeated.
            return [dataclasses.replace(o, request_id=name) for (name, _), o in outputs]

    def generate_dataset(
        self,
        source: Any,
        *,
        output: str | PathLike[str] | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_column: str | None = None,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        trust_row_templates: bool = False,
        **row_options: Any,
    ) -> Any:
        """Answers the rows of a table; returns the same type with columns outputs, usage, error.

        Args:
            source: a path as for `nanoengine batch`; an iterable of dicts or prompts; a
                `datasets.Dataset` or IterableDataset, a pandas or polars frame, an Arrow table. A
                row has the simple format of docs/batch.md.
            output: a file of records, from which the same call resumes after a crash.
            sampling_params: for rows that set nothing; None: the model's own, 256 tokens.
            prompt_column, template, chat, system, trust_row_templates, row_options: fields of
                `jobs.rows.RowOptions`, as the options of `nanoengine batch`.

        Raises:
            RequestError, ConfigError: the source has no supported type; `output` is of another job.
        """
        from nanoengine.jobs.datasets import generate_dataset

        options = {"prompt_column": prompt_column, "template": template, "chat": chat}
        options |= {"system": system, "trust_row_templates": trust_row_templates, **row_options}
        return generate_dataset(self, source, output, sampling_params, **options)

    def embed(self, prompts: Any, **options: Any) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, `outputs.embedding`; docs/embedding.md describes the pooling.

        Args:
            prompts: as in `generate`.
            options: pooling_params (`PoolingParams`); use_tqdm, priority and on_error as in
                `generate`.

        Raises:
            RequestError, PromptTooLongError, CapacityError: like `generate`.
            UnsupportedModelError: the checkpoint needs a feature that is not implemented.
        """
        return self._pool(self._pools.embed, prompts, **options)

    def classify(self, prompts: Any, **options: Any) -> list[ClassificationRequestOutput]:
        """The class probabilities of each prompt, `outputs.probs`, from the checkpoint's
        classification head; otherwise like `embed`."""
        return self._pool(self._pools.classify, prompts, **options)

    def reward(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """The classification head's raw outputs for each prompt's last token, `outputs.data`;
        otherwise like `embed`."""
        return self._pool(self._pools.reward, prompts, **options)

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """How well two texts match, for each of `data_2`, `outputs.score`; otherwise like `embed`.

        A head with one class scores the pair; without it, the score is the embeddings' cosine.

        Args:
            data_1: one text, or one for each of `data_2`.
            options: as for `embed`; answers, words of one token each, such as ("no", "yes"): the
                score is the probability of the last one among them, as the next token; template,
                which makes one prompt of a pair, with {query} and {document}; or chat_template,
                for messages with the roles query and document.
        """
        pair = {name: options.pop(name, None) for name in PAIR_OPTIONS}
        return self._pool(functools.partial(self._pools.score, data_1, **pair), data_2, **options)

    def _pool(
        self,
        ask: Callable[..., PoolRequests],
        prompts: Any,
        pooling_params: Any = None,
        **options: Any,
    ) -> list[Any]:
        requests = ask(prompts, pooling_params)
        return requests.finish(self.generate(requests.prompts, requests.params, **options))

    @functools.cached_property
    def _pools(self) -> PoolingTasks:
        from nanoengine.features.pooling import PoolingTasks

        return PoolingTasks(self.config, self.info.max_model_len, lambda: self.tokenizer)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[BeamSearchOutput]:
        """The beam_width best continuations of each prompt; all prompts are searched concurrently.

        Tokens and scores equal transformers' `generate(num_beams=beam_width, do_sample=False)` with
        the same settings.

        Args:
            prompts: as in `generate`.

        Raises:
            RequestError, PromptTooLongError, CapacityError: a prompt can't run, or max_num_seqs is
                below the beam width.
            NanoEngineError: this LLM is closed.
        """
        from nanoengine.features.beam import beam_search

        check_lora(lora_request)
        with self._calls.exclusive_call():
            return beam_search(self, prompts, params, functools.partial(progress_bar, use_tqdm))


def progress_bar(
    progress: bool | Callable[..., Any], engine: LLMEngine, total: int | None
) -> contextlib.AbstractContextManager[object]:
    """A progress bar of the engine's steps, or a null context."""
    if progress is False:
        return contextlib.nullcontext()
    from nanoengine.observe.progress import progress_bar

    return progress_bar(progress, engine, total)


def error_output(request_id: str, prompt: RefusedPrompt) -> RequestOutput:
    """The output of a prompt that can't run, so that order and count of a batch are kept."""
    failed = CompletionOutput(
        index=0, text="", token_ids=[], finish_reason="error", error=prompt.message
    )
    return RequestOutput(
        request_id=request_id,
        index=prompt.index,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=[failed],
        finished=True,
        key=prompt.key,
    )


def check_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError(
            f"lora_request must be None: LoRA is not supported, got {lora_request!r}"
        )
