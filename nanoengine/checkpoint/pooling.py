"""Reads how a checkpoint's hidden states become embeddings, class probabilities or yes-no scores.

    architectures          the decoder of a model without a language head (`find_decoder`)
    modules.json           Sentence Transformers: which hidden states are pooled, and further layers
    2_Dense                a layer after the pooling
    score.weight           a classification head
    two rows of lm_head    scores of the tokens for yes and no

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
from nanoengine.checkpoint.files import TensorInfo, read_tensors, stored_tensors
from nanoengine.checkpoint.slots import PREFIXES
from nanoengine.errors import ModelError, UnsupportedModelError
from nanoengine.settings.checks import check_value, join_names, quoted
from nanoengine.settings.files import read_object, unreadable
from nanoengine.settings.pooling import Pooling

CLASSIFIER = "ForSequenceClassification"
GENERATOR = "ForCausalLM"
ENCODERS = (
    "Albert", "Bert", "Camembert", "Deberta", "DistilBert", "Electra", "GteModel", "GteNew",
    "JinaBert", "MPNet", "ModernBert", "NewModel", "NomicBert", "Roberta", "T5Encoder", "XLM",
)  # fmt: skip
"""Prefixes of the architectures of encoders."""

CLASSIFIER_WEIGHT = "score.weight"

MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Flag of a Pooling module -> its mode. Other modes are rejected."""


class Dense(NamedTuple):
    """A layer after the pooling: weight [out, in] and bias [out], float32, and the name of its
    activation in torch."""

    weight: np.ndarray
    bias: np.ndarray | float
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The settings of a checkpoint for embeddings.

    Attributes:
        pooling: which hidden states become the vector.
        normalize: whether vectors are scaled to length 1.
        max_tokens: length of the longest supported text; None: the model's context.
        default_prompt: a prompt that sentence-transformers prepends to each text by default.
        dense: layers after the pooling.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    max_tokens: float | None = None
    default_prompt: str = ""
    dense: tuple[Dense, ...] = ()


def find_decoder(name: str, generators: Collection[str]) -> str | None:
    """Finds the architecture in `generators` with the same decoder as `name`, which has no language
    head.

    Raises:
        UnsupportedModelError: the architecture is an encoder.

    >>> find_decoder("Qwen3Model", ["Qwen3ForCausalLM"])
    'Qwen3ForCausalLM'
    """
    for ending in ("TextModel", "Model", f"Text{CLASSIFIER}", CLASSIFIER):
        found = name.removesuffix(ending) + GENERATOR
        if name.endswith(ending) and found in generators:
            return found
    if name.startswith(ENCODERS):
        raise UnsupportedModelError(
            f"architecture {quoted(name)} is an encoder; supported: embedding models that are"
            " based on a decoder, such as Qwen3-Embedding or e5-mistral"
        )
    return None


# --- Sentence Transformers ------------------------------------------------------------------------


def read_pooling(directory: Path) -> PoolingConfig:
    """Reads modules.json of the directory. Without it, the vector is the hidden state of the last
    token, scaled to length 1.

    Raises:
        UnsupportedModelError: a module or a pooling mode is not implemented; the message names it.
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
            f"{path} has the modules {join_names(kinds)}; supported: Transformer and"
            " Pooling, followed by any number of Dense and at most one Normalize"
        )
    paths = [check_value(m.get("path", ""), str, str(path), ModelError) for m in modules]
    if any(Path(part).is_absolute() or ".." in Path(part).parts for part in paths):
        raise ModelError(f"{path} names a directory outside of the checkpoint: {quoted(paths)}")
    if paths[0]:
        raise UnsupportedModelError(
            f"{path}: the model is in {quoted(paths[0])}; supported: in the same directory"
        )
    options = _read_optional(directory / "sentence_bert_config.json")
    if options.get("do_lower_case"):
        raise UnsupportedModelError(
            "sentence_bert_config.json: do_lower_case=True is not implemented; supported: False"
        )
    max_tokens = options.get("max_seq_length")
    if max_tokens is None:
        max_tokens = _read_optional(directory / "tokenizer_config.json").get("model_max_length")
    prompts = _read_optional(directory / "config_sentence_transformers.json")
    named = prompts.get("default_prompt_name")
    return PoolingConfig(
        pooling=_pooling_mode(directory / paths[1] / "config.json"),
        normalize="Normalize" in kinds,
        max_tokens=check_value(max_tokens, int | float | None, "max_seq_length", ModelError),
        default_prompt="" if named is None else str(prompts.get("prompts", {}).get(named, "")),
        dense=tuple(
            _dense(directory / p) for p, kind in zip(paths, kinds, strict=True) if kind == "Dense"
        ),
    )


def _dense(directory: Path) -> Dense:
    """Reads a Dense module.

    Raises:
        UnsupportedModelError: its input is not the pooled vector, or its weight is not a matrix.
    """
    options, stored = read_object(directory / "config.json", ModelError), stored_tensors(directory)
    source = options.get("module_input_name", "sentence_embedding")
    weight, bias = stored.get("linear.weight"), stored.get("linear.bias")
    if source != "sentence_embedding" or weight is None or len(weight.shape) != 2:
        raise UnsupportedModelError(
            f"{directory} is a Dense module with module_input_name={quoted(source)} and the"
            f" tensors {join_names(stored)}; supported: 'sentence_embedding', with a matrix"
            " linear.weight"
        )
    return Dense(
        _read(weight, "linear.weight", ()).numpy(),
        0.0 if bias is None else _read(bias, "linear.bias", ()).numpy(),
        str(options.get("activation_function", "torch.nn.modules.activation.Tanh")),
    )


def _read_optional(path: Path) -> Json:
    return read_object(path, ModelError) if os.path.lexists(path) else {}


def _pooling_mode(path: Path) -> Pooling:
    options = read_object(path, ModelError)
    modes = [key for key, on in options.items() if key.startswith("pooling_mode_") and on is True]
    named = options.get("pooling_mode")  # sentence-transformers writes this key since version 5
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        flags = {"cls": "cls_token", "mean": "mean_tokens"}
        modes = [f"pooling_mode_{flags.get(name, name)}" for name in names]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UnsupportedModelError(
            f"{path} sets {', '.join(map(quoted, modes)) or 'no pooling mode'}; supported: one"
            f" of {', '.join(MODES)}"
        )
    return MODES[modes[0]]


# --- heads ----------------------------------------------------------------------------------------


def read_classifier(directory: Path) -> torch.Tensor | None:
    """The classification head [classes, hidden_size], float32; None: the checkpoint has none.

    Raises:
        WeightLoadError: the files can't be read.
        UnsupportedModelError: the head is not a single matrix.
    """
    stored = stored_tensors(directory)
    if CLASSIFIER_WEIGHT not in stored:
        return None
    extra = [name for name in stored if name.startswith("score.") and name != CLASSIFIER_WEIGHT]
    if extra or len(stored[CLASSIFIER_WEIGHT].shape) != 2:
        what = join_names(extra) or f"the shape {list(stored[CLASSIFIER_WEIGHT].shape)}"
        raise UnsupportedModelError(
            f"the classification head has {what}; supported: one matrix, {CLASSIFIER_WEIGHT}"
        )
    return _read(stored[CLASSIFIER_WEIGHT], CLASSIFIER_WEIGHT, ())


def read_token_rows(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """The rows of the language head for these tokens, [tokens, hidden_size] float32.

    Raises:
        UnsupportedModelError: the language head is quantized.
    """
    stored = stored_tensors(directory)
    tied = [f"{prefix}embed_tokens.weight" for prefix in PREFIXES]
    names = [f"{head}weight" for head in PREFIXES.values()] + tied
    name = next((name for name in names if name in stored), None)
    if name is None or len(stored[name].shape) != 2:
        raise UnsupportedModelError(
            "yes-no scores need a language head that is stored as floats, which this checkpoint"
            " lacks: use a checkpoint that is not quantized"
        )
    rows = [_read(stored[name], name, (slice(row, row + 1),)) for row in token_ids]
    return torch.cat(rows)


def _read(tensor: TensorInfo, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    ((_, found),) = read_tensors(tensor.file, {name: part})
    return found.float()
