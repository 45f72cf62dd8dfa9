"""OtherCalls: what an LLM can be asked besides `generate` and `stream`.

    chat, beam_search, generate_dataset     each is a few calls of the others, or of a feature
    embed, score, classify, reward          of hidden states: features/pooling.py
    reset_prefix_cache, evict               of the engine's cache
    load_weights                            new ones in place: features/new_weights.py
    get_tokenizer, ...                      vLLM's names

The base of `LLM`, which holds the loop. Each feature is imported by the call that needs it.
"""

from __future__ import annotations

import contextlib
import functools
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
from nanoengine.text.prompts import OnError, PromptReader, RefusedPrompt
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
    from nanoengine.features.pooling import Asked, Pools
    from nanoengine.text.prompt_forms import Row

    Prompt = str | Sequence[int] | Mapping[str, Any] | Row


PAIR = ("answers", "template", "chat_template")
"""Options of `score` that say what becomes of a pair of texts."""


class OtherCalls:
    """The calls that are no loop of their own."""

    config: EngineConfig
    _calls: Calls[LLMEngine]
    _tokenizer: Tokenizer | None

    # What `LLM` defines; a call on a closed one says so.
    generate: Callable[..., list[RequestOutput]]
    stream: Callable[..., Generator[RequestOutput, None, None]]
    open_reader: Callable[[], PromptReader]

    @property
    def engine(self) -> LLMEngine:
        """The engine underneath.

        Raises:
            NanoEngineError: this LLM is closed.
            EngineDeadError: this process was forked from the LLM's.
        """
        return self._calls.engine

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
        return self.open_reader().tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers; vLLM's name for `tokenizer.backend`."""
        return self.tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name for `default_sampling_params`."""
        return self.default_sampling_params

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; refuses (False) while blocks are in use."""
        return self.engine.reset_prefix_cache()

    def load_weights(
        self,
        weights: str | PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]],
    ) -> set[str]:
        """Puts new weights in place of the model's; returns the names of their tensors.

        Waits for calls of other threads. What runs, such as a stream, goes on from its tokens under
        the new weights; cached prefixes are dropped, and keys and values computed again.

        Args:
            weights: a folder with a checkpoint of the same model, or (name, tensor) pairs such as
                `model.state_dict()` of transformers. Tensors of any floating dtype are converted to
                what the engine keeps, quantized too where it has quantized at load. Those that are
                not among them stay as they are.

        Raises:
            WeightLoadError: a name, shape or dtype does not fit, or this model's weights can't be
                replaced; nothing has changed.
            EngineDeadError: reading failed after the first tensor was written; the LLM is closed.
        """
        from nanoengine.features.new_weights import load_weights

        with self._calls.alone():
            return load_weights(self.engine, weights)

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the cached content of those given KV blocks that nobody uses; returns how many."""
        return self.engine.evict(block_ids)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for what is not here: says why, where vLLM has it."""
        from nanoengine.settings.vllm_names import LLM_METHODS

        why = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
        raise AttributeError(f"LLM has no {name!r}{why}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise NanoEngineError("an LLM can't be copied or sent to a process: make one there")

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
            tool_choice: "required", or {"type": "function", "function": {"name": ...}}: a grammar
                has each answer be calls of these tools.
            reasoning_parser, tool_call_parser: take answers apart, by vLLM's names of parsers or
                "auto", by the chat template: see `CompletionOutput`.

        Raises:
            RequestError: the tokenizer has no chat template, or it refuses the messages.
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
            from nanoengine.features.answers import answer_form

            asked = (reasoning_parser, tool_call_parser, tools, tool_choice)
            own = chat_template or self.tokenizer.backend.chat_template
            form = answer_form(*asked, lambda: own)
            given = sampling_params or self.default_sampling_params
            sampling_params = form.params(given) if form is not None else given
        outputs = self.generate(
            [{"messages": one, **options} for one in conversation_list(messages)],
            sampling_params,
            use_tqdm,
            lora_request,
            priority=priority,
            on_error=on_error,
        )
        return outputs if form is None else [form.taken_apart(o, o.request_id) for o in outputs]

    def generate_dataset(
        self,
        source: Any,
        *,
        output: str | PathLike[str] | None = None,
        sampling_params: SamplingParams | None = None,
        **row_options: Any,
    ) -> Any:
        """Answers the rows of a table; gives the same kind with columns outputs, usage, error.

        Args:
            source: a path as `nanoengine batch` takes it; an iterable of dicts or prompts; a
                `datasets.Dataset` or IterableDataset, a pandas or polars frame, an Arrow table. A
                row is what docs/batch.md calls a simple one.
            output: a file of records, from which the same call goes on after a death.
            sampling_params: for rows that set nothing; None: the model's own, 256 tokens.
            row_options: prompt_column, template, chat, system and the other fields of
                `jobs.rows.RowOptions`, as the options of `nanoengine batch`.

        Raises:
            RequestError, ConfigError: the source is of no such kind; `output` is of another job.
        """
        from nanoengine.jobs.datasets import generate_dataset

        return generate_dataset(self, source, output, sampling_params, row_options)

    def embed(self, prompts: Any, **options: Any) -> list[EmbeddingRequestOutput]:
        """A vector a prompt, `outputs.embedding`; docs/embedding.md says of what hidden states.

        Args:
            prompts: as in `generate`.
            options: pooling_params (`PoolingParams`); use_tqdm, priority and on_error as in
                `generate`.

        Raises:
            RequestError, PromptTooLongError, CapacityError: as `generate`.
            UnsupportedModelError: the checkpoint asks for what is not implemented.
        """
        return self._pool(self._pools.embed, prompts, **options)

    def classify(self, prompts: Any, **options: Any) -> list[ClassificationRequestOutput]:
        """The classes of each prompt, `outputs.probs`, by the checkpoint's head of classes; as
        `embed`."""
        return self._pool(self._pools.classify, prompts, **options)

    def reward(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """What the head of classes gives for each prompt's last token, as it is, `outputs.data`; as
        `embed`."""
        return self._pool(self._pools.reward, prompts, **options)

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """How well two texts belong together, for each of `data_2`, `outputs.score`; as `embed`.

        A head of one class scores the pair; without one it is the cosine of both embeddings.

        Args:
            data_1: one text, or one for each of `data_2`.
            options: as of `embed`; answers, words of one token each, such as ("no", "yes"): the
                score is how likely the last of them is among all, as the next token; template,
                which makes one prompt of a pair, with {query} and {document}; or chat_template, of
                messages with the roles query and document.
        """
        pair = {name: options.pop(name, None) for name in PAIR}
        return self._pool(functools.partial(self._pools.score, data_1, **pair), data_2, **options)

    def _pool(
        self, ask: Callable[..., Asked], prompts: Any, pooling_params: Any = None, **options: Any
    ) -> list[Any]:
        asked = ask(prompts, pooling_params)
        return asked.finish(self.generate(asked.prompts, asked.params, **options))

    @functools.cached_property
    def _pools(self) -> Pools:
        from nanoengine.features.pooling import Pools

        return Pools(self.config, self.info.max_model_len, lambda: self.tokenizer)

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
        from nanoengine.features.beam import beam_search

        check_lora(lora_request)
        with self._calls.alone():
            return beam_search(self, prompts, params, functools.partial(progress_bar, use_tqdm))


def progress_bar(
    progress: bool | Callable[..., Any], engine: LLMEngine, total: int | None
) -> contextlib.AbstractContextManager[object]:
    """A progress bar of the engine's steps, if one is wanted."""
    if progress is False:
        return contextlib.nullcontext()
    from nanoengine.observe.progress import showing

    return showing(progress, engine, total)


def refused_output(request_id: str, prompt: RefusedPrompt) -> RequestOutput:
    """The output of a prompt that could not run: order and count of a batch are kept."""
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
            f"lora_request must be None: no adapter is applied, got {lora_request!r}"
        )
