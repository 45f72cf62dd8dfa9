"""load_model: from a config and a directory to a model ready to run. Called by the runner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import pin_attributes
from nanoengine.layers.pages import place_buffers, place_parameters
from nanoengine.models.config import ModelConfig
from nanoengine.models.decoder import CausalLM
from nanoengine.models.registry import model_class
from nanoengine.models.weights import dummy_weights, load_weights


def load_model(
    config: ModelConfig,
    directory: str | Path,
    *,
    context: ModelContext,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> CausalLM:
    """Builds the model of `config` on `context.device` and fills it.

    Args:
        load_format: "auto" reads the directory's safetensors files; "dummy" draws weights from
            `seed` and reads nothing.

    Raises:
        ConfigError: the ranks don't divide the model, or `max_positions` passes its context.
        WeightLoadError: see `load_weights`.
    """
    model = model_class(config.architecture)(config, context).eval()
    place_parameters(model)
    if load_format == "dummy":
        dummy_weights(model, seed)
    else:
        load_weights(model, directory)
    place_buffers(model)
    pin_attributes(model)
    model.model.fuse()
    return model
