"""New weights for a running model: all of them are checked, then they overwrite the old ones.

    tensors, or a folder ─ names, shapes, dtypes ─ slots of the layers ─ the existing memory

Each tensor is stored through the slot with which `models/loader.py` has filled the model. Fused,
packed and quantized weights are therefore the same as after a fresh load. The weights keep their
addresses, so CUDA graphs and compiled calls remain valid. Called by `features/new_weights.py` and
by the ranks of a model. The caller drops the prefix cache, whose keys and values belong to the old
weights.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch

from nanoengine.checkpoint.config import ModelConfig, load_model_config
from nanoengine.checkpoint.files import TensorInfo, read_tensors, stored_tensors
from nanoengine.checkpoint.slots import PREFIXES, TensorNames, WeightSlot
from nanoengine.checkpoint.weights import HARMLESS, drop_tied_head, tensors_to_run
from nanoengine.errors import EngineDeadError, WeightLoadError
from nanoengine.layers.embedding import NAME
from nanoengine.layers.kernels import LinearMethod
from nanoengine.models.loader import DTYPES, FLOATS, weight_slots
from nanoengine.runner.start import RunnerSetup
from nanoengine.settings.checks import join_names
from nanoengine.settings.files import is_gguf

Source = Mapping[str, torch.Tensor] | Path
"""Tensors by their checkpoint names, or the folder of a checkpoint."""

DTYPE_NAMES = {**DTYPES, torch.float32: "F32", torch.float64: "F64"}

NOT_COMPARED = {
    "dtype", "eos_sources", "generation_defaults", "ignored_tensors", "tensor_names", "mtp",
}  # fmt: skip
"""Fields of a ModelConfig that don't affect what the layers compute."""


def load_weights(runner: RunnerSetup, source: Source) -> list[str]:
    """Replaces the weights that `source` contains; returns their names.

    Raises:
        WeightLoadError: the weights don't fit, and nothing was written.
        EngineDeadError: a weight can't be read or written, so the model has only a part of them.
    """
    slots = _slots_for(runner, source)
    try:
        with torch.inference_mode(), runner.as_current():
            for name, part in _parts(source, slots):
                slots[name].store(part.to(runner.device))
            for module in runner.model.modules():
                if isinstance(module, LinearMethod):
                    module.finish()
    except Exception as error:
        raise EngineDeadError(f"{error}; only a part of the new weights was loaded") from error
    return sorted(slots)


def _slots_for(runner: RunnerSetup, source: Source) -> dict[str, WeightSlot]:
    """The slots of all given tensors, after checking that the tensors fit them."""
    config = runner.model_config
    why = "it returns vectors or classes, not text" if config.headless else ""
    if config.model_impl == "transformers":
        why = "transformers' modules compute it"
    if config.quantization is not None:
        why = f"its checkpoint stores them in {config.quantization.kind}, not as floats"
    if why:
        raise WeightLoadError(
            f"this model does not support new weights: {why}; create an LLM with the new checkpoint"
        )
    from_gguf = [isinstance(p, Path) and is_gguf(p) for p in (source, runner.options.directory)]
    if from_gguf[0] != from_gguf[1]:
        raise WeightLoadError(
            "new weights must be a GGUF file if this model was loaded from one, and only then: GGUF"
            " may store a norm plus 1 and rows in another order; create an LLM with the new file"
        )
    if isinstance(source, Path):
        _require_same_model(config, source)
        stored = stored_tensors(source)
    else:
        stored = {
            name: TensorInfo(Path(), (*x.shape,), DTYPE_NAMES.get(x.dtype, str(x.dtype)))
            for name, x in source.items()
        }
    stored = tensors_to_run(config, stored)
    known = weight_slots(runner.model)
    if config.tie_word_embeddings:
        known["lm_head.weight"] = known["model.embed_tokens.weight"]
    # Why several: a subset of the tensors may not reveal the prefix, and transformers' names in
    # memory can differ from the names in its files.
    schemes = [
        TensorNames(parts, [f"{prefix}{parts.get(NAME, NAME).removeprefix('model.')}.weight"])
        for parts in (config.tensor_names, {})
        for prefix in PREFIXES
    ]
    fitting = (names for names in schemes if stored.keys() <= _pick(names.of(known), stored).keys())
    names = next(fitting, schemes[0])
    if config.tie_word_embeddings:
        _drop_tied(source, stored, names("lm_head.weight"), names("model.embed_tokens.weight"))
    slots = _pick(names.of(known), stored)
    _require_fit(slots, stored)
    dtype = runner.model.model.embed_tokens.weight.dtype
    new_dtypes = {tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1}
    if dtype.itemsize < runner.dtype.itemsize and new_dtypes - {DTYPE_NAMES[dtype]}:
        warnings.warn(
            f"new weights are rounded to {dtype}, in which this model was loaded: load it from a"
            f" checkpoint of {runner.dtype} to keep their precision",
            stacklevel=5,  # the caller of `LLM.load_weights`
        )
    return slots


def _require_same_model(config: ModelConfig, folder: Path) -> None:
    """Raises WeightLoadError if the config in the folder or GGUF file computes something
    different."""
    if not is_gguf(folder) and not (folder / "config.json").is_file():
        return
    other = load_model_config(folder)
    names = [field.name for field in fields(config) if field.name not in NOT_COMPARED]
    differing = [name for name in names if getattr(config, name) != getattr(other, name)]
    if differing:
        raise WeightLoadError(
            f"{folder} is a different model (different {join_names(differing)}): create an LLM with"
            " it"
        )


def _pick(slots: Mapping[str, WeightSlot], stored: Collection[str]) -> dict[str, WeightSlot]:
    """The slots, or pieces of slots, with these names."""
    found: dict[str, WeightSlot] = {}
    for name, slot in slots.items():
        if name in stored:
            found[name] = slot
        else:
            found |= _pick(slot.pieces, stored)
    return found


def _drop_tied(source: Source, stored: dict[str, TensorInfo], head: str, embedding: str) -> None:
    """Drops a head that is tied to the embedding; raises WeightLoadError if the two differ."""
    if not {head, embedding} <= stored.keys():
        return
    if isinstance(source, Path):
        drop_tied_head(stored, head, embedding)
        return
    del stored[head]
    if source[head].shape != source[embedding].shape or not source[head].equal(source[embedding]):
        raise WeightLoadError(
            f"this model ties {head} to {embedding} (tie_word_embeddings), and the new tensors"
            " differ: pass only one of them"
        )


def _require_fit(slots: Mapping[str, WeightSlot], stored: Mapping[str, TensorInfo]) -> None:
    shapes = {name: stored[name].shape for name in slots}
    problems = {
        "unknown": [n for n in stored if n not in slots and not HARMLESS.fullmatch(n)],
        "mis-shaped": [
            f"{name} {list(shape)}, expected {list(slots[name].shape)}"
            for name, shape in shapes.items()
            if shape != slots[name].shape
        ],
        "not floats": [f"{n} {stored[n].dtype}" for n in slots if stored[n].dtype not in FLOATS],
    }
    if not slots or any(problems.values()):
        found = [f"{problem}: {join_names(names)}" for problem, names in problems.items() if names]
        raise WeightLoadError(
            "new weights don't fit the model, which is unchanged: names and shapes must be as in"
            f" its checkpoint; {'; '.join(found) or 'there are no tensors'}"
        )


def _parts(source: Source, slots: Mapping[str, WeightSlot]) -> Iterator[tuple[str, torch.Tensor]]:
    """The part of each tensor that belongs to this rank."""
    if not isinstance(source, Path):
        for name in slots:  # Why no slicing: with several ranks the source is a folder.
            yield name, source[name].detach()
        return
    by_file: dict[Path, dict[str, tuple[slice, ...]]] = defaultdict(dict)
    for name, tensor in stored_tensors(source).items():
        if name in slots:
            by_file[tensor.file][name] = slots[name].part
    for file, parts in by_file.items():
        yield from read_tensors(file, parts)
