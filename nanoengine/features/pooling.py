"""Embeddings, scores, classes and rewards of prompts, computed from their hidden states.

    Pooler.embed, score, ... ─▶ PoolRequests: prompts, PooledParams, finish
                                         │ run by an engine, or by a job
    hidden states [hidden_size]  ◀───────┘
      embedding      cut to dimensions, length 1
      probs, reward  score.weight [classes, hidden_size]
      score          cosine of two embeddings; a head with one class; one answer among several

`PoolingTasks` reads a checkpoint's pooling configuration and its small heads. The heads are
applied here, on the host: engines only return hidden states. Called by `LLM` and jobs/pooled.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanoengine.checkpoint import pooling as checkpoint
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.find import resolve_model
from nanoengine.core.requests import RequestChecker
from nanoengine.core.sequence import Request
from nanoengine.errors import ModelError, PromptTooLongError, RequestError, UnsupportedModelError
from nanoengine.features import pooled_outputs as outputs
from nanoengine.outputs import RequestOutput
from nanoengine.settings.checks import check_value, quoted
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.files import read_object
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.pooling import TASKS, PooledParams, Pooling, PoolingParams
from nanoengine.text.prompt_forms import prompt_list
from nanoengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Activation = Callable[[np.ndarray], np.ndarray]
Output = outputs.PoolingRequestOutput
Maker = Callable[[np.ndarray], Any]

DEFAULT, RAW = PoolingParams(), PoolingParams(use_activation=False)
MIN_NORM = 1e-12
"""Minimum divisor when a vector is normalized. Source: torch's `normalize`."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) over its sum, for each vector of [.., n]."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


ACTIVATIONS: dict[str, Activation] = {"Identity": lambda x: x, "Sigmoid": sigmoid, "Tanh": np.tanh}
"""Names of torch modules that sentence-transformers configurations may contain."""


def activation(module: str) -> Activation:
    """The function of a torch activation module.

    Raises:
        UnsupportedModelError: it is not implemented.
    """
    name = module.rpartition(".")[2]
    if name not in ACTIVATIONS:
        message = f"the activation {quoted(name)} is not implemented"
        raise UnsupportedModelError(f"{message}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class HeadlessChecker(RequestChecker):
    """Checks requests to a checkpoint without a language model head."""

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any
    ) -> Request:
        if isinstance(params, SamplingParams) and not params.pooling:
            raise RequestError(
                "this checkpoint has no LM head, so it can't generate: call embed, score, classify"
                " or reward"
            )
        return super().check(prompt_token_ids, params, **options)


class PoolRequests(NamedTuple):
    """The requests for an engine, and `finish`, which converts their outputs in the same order."""

    prompts: list[Any]
    params: PooledParams
    finish: Callable[[list[RequestOutput]], list[Any]]


class PoolingTasks:
    """Pooling for one checkpoint. Each part is read when it is first used.

    Args:
        config: names the checkpoint.
        max_model_len: maximum number of tokens per prompt.
        tokenizer: returns the tokenizer, or raises RequestError.
    """

    def __init__(
        self, config: EngineConfig, max_model_len: int, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self._config, self._max_model_len = config, max_model_len
        self._tokenizer = tokenizer

    # --- the checkpoint -------------------------------------------------------------------------

    @functools.cached_property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return resolve_model(self._config)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._tokenizer()

    @functools.cached_property
    def hidden_size(self) -> int:
        """Number of elements of an embedding."""
        if self.embeds.dense:
            return len(self.embeds.dense[-1].weight)
        return load_model_config(self.directory).hidden_size

    @functools.cached_property
    def embeds(self) -> checkpoint.PoolingConfig:
        """The checkpoint's configuration of embeddings."""
        found = checkpoint.read_pooling(self.directory)
        if found.default_prompt:
            message = "the checkpoint's default prompt is not prepended to texts: %r"
            logger.warning(message, found.default_prompt)
        return found

    @functools.cached_property
    def _head(self) -> np.ndarray | None:
        head = checkpoint.read_classifier(self.directory)
        return None if head is None else head.numpy()

    @property
    def classes(self) -> np.ndarray:
        """The classification head [classes, hidden_size].

        Raises:
            UnsupportedModelError: there is none.
        """
        if self._head is None:
            raise UnsupportedModelError(
                f"{self._config.model!r} has no classification head (score.weight): use a model"
                " with one, embed() for embeddings, or score(answers=('no', 'yes'))"
            )
        return self._head

    @functools.cached_property
    def activation(self) -> Activation:
        """Converts the head's results to probabilities. Source: vLLM, `PoolerClassify`."""
        raw = read_object(self.directory / "config.json", ModelError)
        named, kind = raw.get("sentence_transformers"), raw.get("problem_type")
        if isinstance(named, Mapping) and named.get("activation_fn") is not None:
            return activation(str(named["activation_fn"]))
        if kind == "regression":
            return ACTIVATIONS["Identity"]
        is_independent = len(self.classes) == 1 or kind == "multi_label_classification"
        return sigmoid if is_independent else softmax

    # --- requests -------------------------------------------------------------------------------

    def embed(self, prompts: Any, options: PoolingParams | None = None) -> PoolRequests:
        """One embedding per prompt."""
        options = options or DEFAULT
        if (options.dimensions or 1) > self.hidden_size:
            message = f"dimensions must be at most {self.hidden_size}, got {options.dimensions}"
            raise RequestError(message)
        return self._requests(
            (prompts, options, options.pooling or self.embeds.pooling),
            outputs.EmbeddingRequestOutput,
            lambda x: outputs.EmbeddingOutput(embedding=self.vector(x, options).tolist()),
        )

    def classify(self, prompts: Any, options: PoolingParams | None = None) -> PoolRequests:
        """The classes of each prompt."""
        options, _ = options or DEFAULT, self.classes
        return self._requests(
            (prompts, options, "last"),
            outputs.ClassificationRequestOutput,
            lambda x: outputs.ClassificationOutput(probs=self.probs(x, options).tolist()),
        )

    def reward(self, prompts: Any, options: PoolingParams | None = None) -> PoolRequests:
        """The classification head's raw results for each prompt's last token."""
        return self.encode("classify", prompts, replace(options or DEFAULT, use_activation=False))

    def encode(self, task: Any, prompts: Any, options: PoolingParams | None = None) -> PoolRequests:
        """The results of `embed` or `classify` as an array; with token_... tasks, one per token.

        Raises:
            RequestError: `task` is not one of TASKS.
        """
        if task not in TASKS:
            raise RequestError(
                f"pooling_task must be one of {', '.join(TASKS)}, got {quoted(task)}"
            )
        options, kind = options or DEFAULT, task.removeprefix("token_")
        make = self.vector if kind == "embed" else self.probs
        whole: PoolRequests = getattr(self, kind)(prompts, options)

        def finish(found: list[RequestOutput]) -> list[Any]:
            kind = outputs.PoolingRequestOutput
            return [
                kind.of(one, lambda x: outputs.PoolingOutput(data=make(x, options)))
                for one in found
            ]

        params = whole.params if kind == task else PooledParams(pooling="all")
        return whole._replace(params=params, finish=finish)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        options: PoolingParams | None = None,
        *,
        answers: Sequence[str] | None = None,
        template: str | None = None,
        chat_template: str | None = None,
    ) -> PoolRequests:
        """How well each text of `data_2` matches its text in `data_1`."""
        options, pairs = options or DEFAULT, paired(data_1, data_2)
        if answers is None and self._head is None:
            return self._cosines(pairs, options, template or chat_template)
        head = self._answer_head(answers) if answers is not None else self._only_class(options)
        return self._requests(
            ([self._join_pair(*pair, template, chat_template) for pair in pairs], options, "last"),
            outputs.ScoringRequestOutput,
            lambda x: outputs.ScoringOutput(score=float(head(x))),
        )

    def _requests(
        self, what: tuple[Any, PoolingParams, Pooling], kind: type[Output], make: Maker
    ) -> PoolRequests:
        """Requests for prompts, with one output of type `kind` each, created by `make` from hidden
        states [hidden_size]."""
        prompts, options, pooling = what
        truncated = [self._truncated(prompt, options) for prompt in prompt_list(prompts)]
        params = PooledParams(pooling=pooling)
        return PoolRequests(truncated, params, lambda outs: [kind.of(x, make) for x in outs])

    def _cosines(
        self, pairs: list[tuple[str, str]], options: PoolingParams, template: str | None
    ) -> PoolRequests:
        """The cosine of both texts' embeddings; each distinct text is computed once."""
        if template is not None:
            raise RequestError(
                "template joins a pair into one prompt, but this checkpoint embeds each text"
                " separately: remove template, or give answers=('no', 'yes')"
            )
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))

        def finish(found: list[RequestOutput]) -> list[Any]:
            of_text = dict(zip(texts, found, strict=True))
            return [self._cosine(of_text[a], of_text[b]) for a, b in pairs]

        return self.embed(texts, options)._replace(finish=finish)

    # --- prompts --------------------------------------------------------------------------------

    def _truncated(self, prompt: Any, options: PoolingParams) -> Any:
        """The prompt, truncated if requested; or an error if it is too long for the checkpoint."""
        max_tokens, truncate = self._max_model_len, options.truncate_prompt_tokens
        limit = self.embeds.max_tokens or max_tokens
        if limit >= max_tokens and truncate is None:
            return prompt
        given = prompt if isinstance(prompt, Mapping) else {}
        text = given.get("prompt") if given else prompt
        ids = given.get("prompt_token_ids") if given else prompt
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            if not isinstance(text, str):
                return prompt  # a conversation, or a prompt that the reader rejects
            ids = self.tokenizer.encode(text)
        max_tokens = int(min(max_tokens, limit, max_tokens if truncate in (None, -1) else truncate))
        if len(ids) > max_tokens and truncate is None:
            return PromptTooLongError(
                f"the prompt has {len(ids)} tokens, but the checkpoint supports at most"
                f" {max_tokens} (max_seq_length, model_max_length): shorten it, or set"
                " truncate_prompt_tokens=-1"
            )
        text = text if isinstance(text, str) else None
        if len(ids) > max_tokens:
            ids = self._truncate_ids(text, list(ids), max_tokens)
        return {**given, "prompt": text, "prompt_token_ids": ids}

    def _truncate_ids(self, text: str | None, ids: list[int], max_tokens: int) -> list[int]:
        """The first tokens, followed by the tokens that the tokenizer appends to each text."""
        num_suffix = 0
        if text is not None:
            plain = self.tokenizer.encode(text, add_special_tokens=False)
            starts = range(len(ids) - len(plain) + 1)
            start = next((n for n in starts if ids[n : n + len(plain)] == plain), len(ids))
            num_suffix = min(max(len(ids) - len(plain) - start, 0), max_tokens)
        return ids[: max_tokens - num_suffix] + ids[len(ids) - num_suffix :]

    def _join_pair(self, first: str, second: str, template: str | None, chat: str | None) -> Any:
        """One prompt for a pair: a filled template, or both texts as joined by the tokenizer.

        Why the template is split first: texts may contain its placeholders.
        """
        if chat is not None:
            sides = {"query": first, "document": second}.items()
            messages = [{"role": role, "content": text} for role, text in sides]
            return {"messages": messages, "chat_template": chat, "add_generation_prompt": False}
        if template is None:
            return {"prompt_token_ids": self.tokenizer.backend(first, second)["input_ids"]}
        parts = template.split("{query}")
        if len(parts) != 2 or template.count("{document}") != 1:
            raise RequestError("template must contain {query} once and {document} once")
        return first.join(part.replace("{document}", second) for part in parts)

    # --- hidden states --------------------------------------------------------------------------

    def vector(self, hidden: np.ndarray, options: PoolingParams) -> np.ndarray:
        """Converts (mean) hidden states [.., hidden_size] to embeddings [.., dimensions]."""
        for dense in self.embeds.dense:
            hidden = activation(dense.activation)(hidden @ dense.weight.T + dense.bias)
        vector, normalize = hidden[..., : options.dimensions], options.use_activation
        if self.embeds.normalize if normalize is None else normalize:
            lengths = np.linalg.norm(vector, axis=-1, keepdims=True)
            vector = vector / np.maximum(lengths, MIN_NORM)
        return vector

    def probs(self, hidden: np.ndarray, options: PoolingParams) -> np.ndarray:
        """Converts hidden states [.., hidden_size] to classes [.., classes]."""
        found = hidden @ self.classes.T
        return found if options.use_activation is False else self.activation(found)

    def _cosine(self, first: RequestOutput, second: RequestOutput) -> Output:
        """The cosine of two embeddings as a score."""
        error, score = first.error or second.error, None
        if error is None:
            a, b = (self.vector(one.pooled, RAW) for one in (first, second))
            lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
            score = outputs.ScoringOutput(score=float(a @ b) / max(lengths, MIN_NORM))
        return outputs.ScoringRequestOutput(
            request_id=second.request_id,
            outputs=score,
            prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
            error=error,
        )

    def _only_class(self, options: PoolingParams) -> Activation:
        """Hidden state [hidden_size] -> the only class."""
        if len(self.classes) != 1:
            raise UnsupportedModelError(
                "score needs a classification head with one class, and score.weight has"
                f" {len(self.classes)}: call classify"
            )
        return lambda hidden: self.probs(hidden, options)[0]

    def _answer_head(self, answers: Sequence[str]) -> Activation:
        """Hidden state [hidden_size] -> probability of the last answer among all answers."""
        answers = check_value(answers, tuple[str, ...], "answers", RequestError)
        ids = [self.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        if len(answers) < 2 or any(len(tokens) != 1 for tokens in ids):
            raise RequestError(
                "answers must be at least two words of one token each, got"
                f" {quoted(answers)} with token ids {quoted(ids)}"
            )
        config = load_model_config(self.directory)
        if config.model_impl == "transformers":
            raise UnsupportedModelError(
                f"answers need a native model, and {config.architecture} has none: transformers'"
                " modules may add biases to logits, or scale them"
            )
        rows = checkpoint.read_token_rows(self.directory, [tokens[0] for tokens in ids]).numpy()
        scale, cap = config.plan.logit_scale, config.plan.final_logit_softcapping

        def head(hidden: np.ndarray) -> np.ndarray:
            logits = rows @ hidden * scale
            return softmax(cap * np.tanh(logits / cap) if cap else logits)[-1]

        return head


def paired(data_1: Any, data_2: Any) -> list[tuple[str, str]]:
    """The pairs of two sides; a single first text is paired with each of the second side."""
    sides = []
    for name, given in (("data_1", data_1), ("data_2", data_2)):
        side = [given] if isinstance(given, str) else given
        sides.append(check_value(side, list[str], name, RequestError))
    firsts, seconds = sides
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds) or not seconds:
        raise RequestError(
            f"data_1 must be one text, or as many as data_2, got {len(firsts)} and {len(seconds)}"
        )
    return list(zip(firsts, seconds, strict=True))
