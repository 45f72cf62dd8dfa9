"""The scales of an fp8 KV cache, which some checkpoints store next to a layer's projections.

`models/loader.py` uses this for checkpoints that have such scales. Layers without them have the
scale 1. A KV cache of another dtype ignores them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.errors import WeightLoadError
from nanoengine.layers.attention import Attention

KV_SCALES = ("k_scale", "v_scale")


def scale_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Slots of the scales of all attention layers, by this package's tensor names.

    Raises:
        WeightLoadError: from a slot: a scale is not a positive number.
    """
    slots = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Attention):
            for kind in KV_SCALES:
                name = f"{path.rpartition('.')[0]}.{kind}"
                store = partial(_store, layer, name)
                slots[name] = WeightSlot(
                    shape=(1,), store=store, on_missing=partial(store, torch.ones(1))
                )
    return slots


def _store(layer: Attention, name: str, scale: torch.Tensor) -> None:
    value = scale.item()
    if not 0 < value < float("inf"):
        raise WeightLoadError(f"{name} must be a positive number, got {value}")
    spec = replace(layer.spec, **{name.rpartition(".")[2]: value})
    layer.cache = layer.cache._replace(spec=spec)
