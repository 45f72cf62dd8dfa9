"""ModelConfig of a decoder that transformers computes, from its own config class.

Called by `config.py` if no family here has the architecture, and with `model_impl="transformers"`.
`models/transformers_backend.py` runs the model, and checks what a config can't show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoengine.checkpoint.config_reader import Json
from nanoengine.checkpoint.families import TEXT_PARTS
from nanoengine.checkpoint.layer_config import FULL, SLIDING, LayerConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import truncate
from nanoengine.settings.files import is_gguf


def is_decoder(raw: Json) -> bool:
    """True if the config, or its text_config, is of a causal language model in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names, endings = raw.get("architectures") or (), ("ForCausalLM", "LMHeadModel")
    known = (raw.get("text_config") or raw).get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and all(str(name).endswith(endings) or name in TEXT_PARTS for name in names)


def complete_text_config(text: Json) -> Json:
    """A `text_config` with the sizes that it lacks, which are the defaults of its config class."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**text).to_dict()
    except Exception as error:  # its config classes raise anything
        raise UnsupportedModelError(f"text_config is not valid: {truncate(error)}") from error


def text_config(model: Path) -> Any:
    """transformers' config of the text model of a checkpoint, or of a GGUF file."""
    from transformers import AutoConfig

    if not is_gguf(model):
        return AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    from nanoengine.checkpoint.gguf_models import transformers_keys
    from nanoengine.checkpoint.gguf_tensors import GGUFModel

    return AutoConfig.for_model(**transformers_keys(GGUFModel(model)))


def sizes_of(directory: Path) -> dict[str, Any]:
    """Reads fields of ModelConfig from a checkpoint that transformers can load, or a GGUF file.

    Raises:
        UnsupportedModelError: the config says that something besides attention depends on earlier
            tokens, or on the other sequences of a step.
    """
    try:
        config = text_config(directory)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
    except UnsupportedModelError:
        raise
    except Exception as error:  # its config classes raise anything
        raise UnsupportedModelError(
            f"{directory} cannot run in transformers' modules: {truncate(error)}"
        ) from error
    name = config.model_type
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    other = {*kinds} - {FULL, SLIDING}
    ropes = getattr(config, "rope_parameters", None) or {}
    every_rope = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    # Why: their angles depend on the longest sequence of a step.
    other |= {
        rope["rope_type"]
        for rope in every_rope
        if rope.get("rope_type") == "dynamic" or rope.get("long_factor") != rope.get("short_factor")
    }
    other |= {"quantization_config"} if getattr(config, "quantization_config", None) else set()
    if other:
        raise UnsupportedModelError(
            f"{name} cannot run in transformers' modules: it has {', '.join(sorted(other))};"
            " supported: full and sliding-window attention, RoPE that does not depend on the length"
            " of other sequences, and weights in floats"
        )
    equal = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return {key: getattr(config, key) for key in equal} | {
        "vocab_size": getattr(config, "output_vocab_size", None) or config.vocab_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or config.hidden_size,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "qk_head_dim", None)  # of MLA
        or getattr(config, "head_dim", None)
        or config.hidden_size // heads,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2**20,
        "rms_norm_eps": 0.0,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "plan": LayerConfig(),
        "ropes": (None,) * layers,
        "sliding_windows": tuple(
            window if (kinds[n] == SLIDING if kinds else window) else None for n in range(layers)
        ),
    }
