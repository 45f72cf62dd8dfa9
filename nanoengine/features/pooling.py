"""Vectors, scores, classes and rewards of prompts: what becomes of their hidden states.

    prompts ─ Pools.prompt ─▶ PooledParams ─▶ an engine ─▶ RequestOutput.pooled [hidden_size]
                                                               │
    embedding ◀─ cut to dimensions, length 1 ──────────────────┤
    probs, reward ◀─ score.weight [classes, hidden_size] ──────┤
    score ◀─ cosine of two; a class; the answer yes among two ─┘

`Pools` knows what a checkpoint says of this and reads its small heads; `PooledCalls` are the calls
of an LLM. Heads are multiplied here, on the host: they are a few rows, and engines give the hidden
states alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.checkpoint import pooling as checkpoint
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.find import resolve_model
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.requests import RequestChecker
from nanoengine.core.sequence import Request
from nanoengine.errors import ModelError, PromptTooLongError, RequestError, UnsupportedModelError
from nanoengine.features.pooled_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanoengine.outputs import RequestOutput
from nanoengine.settings.checks import check_value, read_object, shown
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.pooling import PooledParams, PoolingParams
from nanoengine.text.prompt_forms import prompt_list
from nanoengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Activation = Callable[[np.ndarray], np.ndarray]

PLAIN = PoolingParams()
LEAST_LENGTH = 1e-12
"""A vector shorter than this stays as short as it is. Source: torch's `normalize`."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) by its sum."""
    powers = np.exp(x - x.max())
    return powers / powers.sum()


ACTIVATIONS: dict[str, Activation] = {"Identity": lambda x: x, "Sigmoid": sigmoid}
"""Names of torch's modules that a cross-encoder of sentence-transformers may name."""


class HeadlessChecker(RequestChecker):
    """Checks requests to a checkpoint that can't generate."""

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any
    ) -> Request:
        if not params.is_pooled:
            raise RequestError(
                "this checkpoint has no language head, so it generates nothing: call embed, score,"
                " classify or reward"
            )
        return super().check(prompt_token_ids, params, **options)


class Pools:
    """What a checkpoint's hidden states become. Each part is read when it is first asked for.

    Args:
        config: names the checkpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    @functools.cached_property
    def directory(self) -> Path:
        """Of the checkpoint."""
        return resolve_model(self._config)

    @functools.cached_property
    def embeds(self) -> checkpoint.PoolingConfig:
        """What the checkpoint says of embeddings."""
        found = checkpoint.read_pooling(self.directory)
        if found.default_prompt:
            logger.warning(
                "the checkpoint's default prompt is not put before texts: %r", found.default_prompt
            )
        return found

    @functools.cached_property
    def classes(self) -> np.ndarray:
        """The head of classes [classes, hidden_size].

        Raises:
            UnsupportedModelError: there is none.
        """
        head = checkpoint.read_classes(self.directory)
        if head is None:
            raise UnsupportedModelError(
                f"{self._config.model!r} has no head of classes (score.weight): use a checkpoint"
                " of ...ForSequenceClassification, or embed, or score with answers=('no', 'yes')"
            )
        return head.numpy()

    @functools.cached_property
    def activation(self) -> Activation:
        """What makes probabilities of the head's results. Source: vLLM, `PoolerClassify`."""
        raw = read_object(self.directory / "config.json", ModelError)
        named = raw.get("sentence_transformers")
        if isinstance(named, Mapping) and named.get("activation_fn") is not None:
            name = str(named["activation_fn"]).rpartition(".")[2]
            if name not in ACTIVATIONS:
                raise UnsupportedModelError(
                    f"config.json: activation_fn={shown(named['activation_fn'])} is not"
                    f" implemented; supported: {', '.join(ACTIVATIONS)}"
                )
            return ACTIVATIONS[name]
        kind = raw.get("problem_type")
        if kind == "regression":
            return ACTIVATIONS["Identity"]
        is_one = len(self.classes) == 1 or kind == "multi_label_classification"
        return sigmoid if is_one else softmax

    @functools.cached_property
    def is_classifier(self) -> bool:
        """Whether there is a head of classes."""
        return checkpoint.read_classes(self.directory) is not None

    # --- asking -------------------------------------------------------------------------------

    def embed_params(self, asked: PoolingParams) -> PooledParams:
        """The engine's parameters for an embedding."""
        return PooledParams(pooling=asked.pooling or self.embeds.pooling)

    def fitted(
        self, prompt: Any, asked: PoolingParams, tokenizer: Callable[[], Tokenizer], most: int
    ) -> Any:
        """The prompt, cut where that is asked for; or why it is too long for the checkpoint.

        Args:
            most: tokens that the engine takes.
        """
        limit, cut = self.embeds.max_tokens or most, asked.truncate_prompt_tokens
        if limit >= most and cut is None:
            return prompt
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            if not isinstance(text, str):
                return prompt  # a conversation, or what the reader refuses
            ids = tokenizer().encode(text)
        most = int(min(most, limit, most if cut in (None, -1) else cut))
        if len(ids) > most and cut is None:
            return PromptTooLongError(
                f"the prompt has {len(ids)} tokens, and the checkpoint's vectors are made for at"
                f" most {most} (max_seq_length, model_max_length): shorten it, or set"
                " truncate_prompt_tokens=-1"
            )
        if len(ids) > most:
            ids = cut_text(text, list(ids), most, tokenizer)
        given = prompt if isinstance(prompt, Mapping) else {}
        return {**given, "prompt": text if isinstance(text, str) else None, "prompt_token_ids": ids}

    # --- answering ----------------------------------------------------------------------------

    def embedding(self, hidden: np.ndarray, asked: PoolingParams) -> np.ndarray:
        """A hidden state, or a mean of some, [hidden_size] as an embedding [dimensions]."""
        size = asked.dimensions or len(hidden)
        if size > len(hidden):
            raise RequestError(f"dimensions must be at most {len(hidden)}, got {size}")
        vector = hidden[:size]
        asks = asked.use_activation
        if self.embeds.normalize if asks is None else asks:
            vector = vector / max(float(np.linalg.norm(vector)), LEAST_LENGTH)
        return vector

    def probs(self, hidden: np.ndarray, asked: PoolingParams) -> np.ndarray:
        """The classes of a prompt, by its last token's hidden state [hidden_size]."""
        found = self.classes @ hidden
        return found if asked.use_activation is False else self.activation(found)

    def require_score(self) -> None:
        """Raises UnsupportedModelError for a head of more than one class, which gives no score."""
        if len(self.classes) != 1:
            raise UnsupportedModelError(
                f"a score needs a head of one class, and score.weight has {len(self.classes)}:"
                " call classify"
            )

    def answer_head(self, answers: Sequence[str], tokenizer: Tokenizer) -> Activation:
        """Hidden state [hidden_size] -> how likely the last of the answers is among them all.

        Args:
            answers: words that are one token each.
        """
        answers = check_value(answers, tuple[str, ...], "answers", RequestError)
        ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        if len(answers) < 2 or any(len(tokens) != 1 for tokens in ids):
            raise RequestError(
                f"answers must be two words or more, each one token, got {shown(answers)}, which"
                f" are {shown(ids)}"
            )
        rows = checkpoint.read_token_rows(self.directory, [tokens[0] for tokens in ids]).numpy()
        plan = load_model_config(self.directory).plan
        scale, cap = plan.logit_scale, plan.logit_softcap

        def score(hidden: np.ndarray) -> np.ndarray:
            logits = rows @ hidden * scale
            return softmax(cap * np.tanh(logits / cap) if cap else logits)[-1]

        return score


def cut_text(
    text: object, ids: list[int], most: int, tokenizer: Callable[[], Tokenizer]
) -> list[int]:
    """The first tokens, and behind them those that the tokenizer puts at the end of each text."""
    behind = 0
    if isinstance(text, str):
        plain = tokenizer().encode(text, add_special_tokens=False)
        before = next(n for n in range(len(ids) + 1) if ids[n : n + len(plain)] == plain)
        behind = min(len(ids) - len(plain) - before, most)
    return ids[: most - behind] + ids[len(ids) - behind :]


class PooledCalls:
    """The calls of an LLM that generate nothing.

    Args:
        generate: the LLM's.
        tokenizer: gives the LLM's, or raises RequestError.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        generate: Callable[..., list[RequestOutput]],
        tokenizer: Callable[[], Tokenizer],
    ) -> None:
        self.pools = Pools(config)
        self._info, self._generate, self._tokenizer = info, generate, tokenizer

    def _run(
        self, prompts: Any, params: PooledParams, asked: PoolingParams, options: dict[str, Any]
    ) -> list[RequestOutput]:
        given, most = prompt_list(prompts), self._info.max_model_len
        fitted = [self.pools.fitted(one, asked, self._tokenizer, most) for one in given]
        return self._generate(fitted, params, **options)

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """A vector a prompt."""
        asked = pooling_params or PLAIN
        pools = self.pools

        def make(hidden: np.ndarray) -> EmbeddingOutput:
            return EmbeddingOutput(embedding=pools.embedding(hidden, asked).tolist())

        found = self._run(prompts, pools.embed_params(asked), asked, options)
        return [EmbeddingRequestOutput.of(one, make) for one in found]

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """The classes of each prompt."""
        asked, pools = pooling_params or PLAIN, self.pools
        _ = pools.classes

        def make(hidden: np.ndarray) -> ClassificationOutput:
            return ClassificationOutput(probs=pools.probs(hidden, asked).tolist())

        found = self._run(prompts, PooledParams(), asked, options)
        return [ClassificationRequestOutput.of(one, make) for one in found]

    def reward(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """What the head of classes makes of each prompt's last token, as it is."""
        head = self.pools.classes

        def make(hidden: np.ndarray) -> PoolingOutput:
            return PoolingOutput(data=head @ hidden)

        found = self._run(prompts, PooledParams(), pooling_params or PLAIN, options)
        return [PoolingRequestOutput.of(one, make) for one in found]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        pooling_params: PoolingParams | None = None,
        answers: Sequence[str] | None = None,
        template: str | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` belongs to its one of `data_1`."""
        asked = pooling_params or PLAIN
        firsts, seconds = paired(data_1, data_2)
        if answers is None and not self.pools.is_classifier:
            return self._cosines(firsts, seconds, asked, template, options)
        pairs = self.pairs(firsts, seconds, template)
        head = self.score_head(answers, asked)

        def make(hidden: np.ndarray) -> ScoringOutput:
            return ScoringOutput(score=float(head(hidden)))

        found = self._run(pairs, PooledParams(), asked, options)
        return [ScoringRequestOutput.of(one, make) for one in found]

    def score_head(self, answers: Sequence[str] | None, asked: PoolingParams) -> Activation:
        """Hidden state of a pair's last token [hidden_size] -> its score."""
        if answers is not None:
            return self.pools.answer_head(answers, self._tokenizer())
        self.pools.require_score()
        return lambda hidden: self.pools.probs(hidden, asked)[0]

    def pairs(self, firsts: list[str], seconds: list[str], template: str | None) -> list[Any]:
        """A prompt for each pair: the template filled in, or both texts as the tokenizer puts a
        pair."""
        both = zip(firsts, seconds, strict=True)
        if template is not None:
            return [filled(template, *one) for one in both]
        backend = self._tokenizer().backend
        return [{"prompt_token_ids": backend(*one)["input_ids"]} for one in both]

    def _cosines(
        self,
        firsts: list[str],
        seconds: list[str],
        asked: PoolingParams,
        template: str | None,
        options: dict[str, Any],
    ) -> list[ScoringRequestOutput]:
        """The cosine of the embeddings of both texts, of which each different one is made once."""
        if template is not None:
            raise RequestError(
                "template joins a pair to one prompt, and this checkpoint gives a vector for each"
                " text: leave it out, or give answers=('no', 'yes')"
            )
        texts = list(dict.fromkeys([*firsts, *seconds]))
        found = self._run(texts, self.pools.embed_params(asked), asked, options)
        by_text = dict(zip(texts, found, strict=True))
        return [self._cosine(by_text[a], by_text[b]) for a, b in zip(firsts, seconds, strict=True)]

    def _cosine(self, first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
        error = first.error or second.error
        score = None
        if error is None:
            score = ScoringOutput(score=cosine(first.pooled, second.pooled))
        return ScoringRequestOutput(
            request_id=second.request_id,
            outputs=score,
            prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
            error=error,
        )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine between two vectors [hidden_size]."""
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / max(lengths, LEAST_LENGTH)


def filled(template: str, first: str, second: str) -> str:
    """A template with a pair in the places of {query} and {document}; texts may hold these too."""
    parts = template.split("{query}")
    if len(parts) != 2 or template.count("{document}") != 1:
        raise RequestError("template must hold {query} once and {document} once")
    return first.join(part.replace("{document}", second) for part in parts)


def paired(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """Both sides of pairs, the first one's single text repeated for each of the second's."""
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
    return firsts, seconds
