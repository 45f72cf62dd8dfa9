"""The purpose of a checkpoint's hidden states: embedding, classification, or yes-no scores.

    architectures          the decoder of a model without a language head (`decoder_of`)
    modules.json           Sentence Transformers: which hidden states, and how they are processed
    2_Dense                one of its layers after the pooling
    score.weight           a classification head
    two rows of lm_head    the answers yes and no

Called by `config.py` for an architecture that is not a language model, and by
`features/pooling.py`. Source: the files that sentence-transformers and transformers write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoengine.checkpoint.config_reader import Json
from nanoengine.checkpoint.files import Stored, read_tensors, stored_tensors
from nanoengine.checkpoint.slots import PREFIXES
from nanoengine.errors import ModelError, UnsupportedModelError
from nanoengine.settings.checks import check_value, join_names, repr_short
from nanoengine.settings.files import read_object, unreadable
from nanoengine.settings.pooling import Pooling

CLASSIFIER = "ForSequenceClassification"
GENERATOR = "ForCausalLM"
ENCODERS = (
    "Albert", "Bert", "Camembert", "Deberta", "DistilBert", "Electra", "GteModel", "GteNew",
    "JinaBert", "MPNet", "ModernBert", "NewModel", "NomicBert", "Roberta", "T5Encoder", "XLM",
)  # fmt: skip
"""Prefixes of the architectures of encoders."""

HEAD = "score.weight"

MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Flag of a Pooling module -> its mode; any other flag is rejected."""


class Dense(NamedTuple):
    """A layer after the pooling: weight [out, in] and bias [out], float32, and torch's name of its
    activation."""

    weight: np.ndarray
    bias: np.ndarray | float
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """A checkpoint's settings for embeddings.

    Attributes:
        pooling: which hidden states are used.
        normalize: whether vectors are scaled to length 1.
        max_tokens: the longest supported text; None: the model's context.
        default_prompt: prepended to each text by sentence-transformers, by default.
        dense: layers after the pooling.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    max_tokens: float | None = None
    default_prompt: str = ""
    dense: tuple[Dense, ...] = ()


def decoder_of(name: str, generators: Collection[str]) -> str | None:
    """Finds the entry of `generators` that has the same decoder as an architecture without its
    head.

    Raises:
        UnsupportedModelError: it is an encoder.

    >>> decoder_of("Qwen3Model", ["Qwen3ForCausalLM"])
    'Qwen3ForCausalLM'
    """
    for ending in ("TextModel", "Model", f"Text{CLASSIFIER}", CLASSIFIER):
        found = name.removesuffix(ending) + GENERATOR
        if name.endswith(ending) and found in generators:
            return found
    if name.startswith(ENCODERS):
        raise UnsupportedModelError(
            f"architecture {repr_short(name)} is an encoder, in which a token sees those behind it;"
            " only decoders are implemented: use a model on the base of one, such as"
            " Qwen3-Embedding or e5-mistral"
        )
    return None


# --- Sentence Transformers ------------------------------------------------------------------------


def read_pooling(directory: Path) -> PoolingConfig:
    """Reads the directory's modules.json; without it, the last token with length 1.

    Raises:
        UnsupportedModelError: names a module or a kind of pooling that is not implemented.
    """
    path = directory / "modules.json"
    if not os.path.lexists(path):
        return PoolingConfig()
    import json

    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error, ModelError) from error
    modules = check_value(modules, list[dict[str, Any]], str(path), ModelError)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise UnsupportedModelError(
            f"{path} has the modules {join_names(kinds)}; supported: Transformer,"
            " Pooling and, behind them, Dense and Normalize"
        )
    where = [check_value(one.get("path", ""), str, str(path), ModelError) for one in modules]
    if any(Path(part).is_absolute() or ".." in Path(part).parts for part in where):
        raise ModelError(f"{path} names a directory outside of the checkpoint: {repr_short(where)}")
    if where[0]:
        raise UnsupportedModelError(
            f"{path} keeps the model in {repr_short(where[0])}; supported: beside it"
        )
    options = _optional(directory / "sentence_bert_config.json")
    if options.get("do_lower_case"):
        raise UnsupportedModelError(
            "sentence_bert_config.json: do_lower_case=True is not implemented; supported: False"
        )
    max_tokens = options.get("max_seq_length")
    if max_tokens is None:
        max_tokens = _optional(directory / "tokenizer_config.json").get("model_max_length")
    prompts = _optional(directory / "config_sentence_transformers.json")
    named = prompts.get("default_prompt_name")
    return PoolingConfig(
        pooling=_mode(directory / where[1] / "config.json"),
        normalize="Normalize" in kinds,
        max_tokens=check_value(max_tokens, int | float | None, "max_seq_length", ModelError),
        default_prompt="" if named is None else str(prompts.get("prompts", {}).get(named, "")),
        dense=tuple(
            _dense(directory / at) for at, kind in zip(where, kinds, strict=True) if kind == "Dense"
        ),
    )


def _dense(directory: Path) -> Dense:
    """Reads a Dense module.

    Raises:
        UnsupportedModelError: its input is not only the pooled vector.
    """
    options, stored = read_object(directory / "config.json", ModelError), stored_tensors(directory)
    asked = options.get("module_input_name", "sentence_embedding")
    weight, bias = stored.get("linear.weight"), stored.get("linear.bias")
    if asked != "sentence_embedding" or weight is None or len(weight.shape) != 2:
        raise UnsupportedModelError(
            f"{directory} is a Dense module of {repr_short(asked)} with {join_names(stored)};"
            " supported: one of 'sentence_embedding' with the matrix linear.weight"
        )
    return Dense(
        _read(weight, "linear.weight", ()).numpy(),
        0.0 if bias is None else _read(bias, "linear.bias", ()).numpy(),
        str(options.get("activation_function", "torch.nn.modules.activation.Tanh")),
    )


def _optional(path: Path) -> Json:
    return read_object(path, ModelError) if os.path.lexists(path) else {}


def _mode(path: Path) -> Pooling:
    given = read_object(path, ModelError)
    asked = [key for key, on in given.items() if key.startswith("pooling_mode_") and on is True]
    named = given.get("pooling_mode")  # as sentence-transformers writes it since version 5
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        ends = {"cls": "cls_token", "mean": "mean_tokens"}
        asked = [f"pooling_mode_{ends.get(name, name)}" for name in names]
    if len(asked) != 1 or asked[0] not in MODES:
        raise UnsupportedModelError(
            f"{path} asks for {', '.join(map(repr_short, asked)) or 'no pooling'}; supported: one"
            f" of {', '.join(MODES)}"
        )
    return MODES[asked[0]]


# --- heads ----------------------------------------------------------------------------------------


def read_classes(directory: Path) -> torch.Tensor | None:
    """The classification head [classes, hidden_size], float32; None: the checkpoint has none.

    Raises:
        WeightLoadError: the files can't be read.
        UnsupportedModelError: the head has another form.
    """
    stored = stored_tensors(directory)
    if HEAD not in stored:
        return None
    beside = [name for name in stored if name.startswith("score.") and name != HEAD]
    if beside or len(stored[HEAD].shape) != 2:
        raise UnsupportedModelError(
            f"the head of classes has {join_names(beside) or list(stored[HEAD].shape)}; supported:"
            f" one matrix, {HEAD}"
        )
    return _read(stored[HEAD], HEAD, ())


def read_token_rows(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """The rows of the language head for these tokens [tokens, hidden_size], float32.

    Raises:
        UnsupportedModelError: the head is not stored as floats.
    """
    stored = stored_tensors(directory)
    tied = [f"{prefix}embed_tokens.weight" for prefix in PREFIXES]
    names = [f"{head}weight" for head in PREFIXES.values()] + tied
    name = next((name for name in names if name in stored), None)
    if name is None or len(stored[name].shape) != 2:
        raise UnsupportedModelError(
            "the checkpoint has no language head of floats, so the answers yes and no have no"
            " score: use the checkpoint that was not quantized"
        )
    rows = [_read(stored[name], name, (slice(row, row + 1),)) for row in token_ids]
    return torch.cat(rows)


def _read(tensor: Stored, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    ((_, found),) = read_tensors(tensor.file, {name: part})
    return found.float()
