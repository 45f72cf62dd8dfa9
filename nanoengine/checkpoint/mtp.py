"""The MTP layer (multi-token prediction) of a checkpoint: one more decoder layer, which drafts.

    DeepSeek-V3, GLM-4.5   model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm, self_attn, ...}
    GGUF                   blk.N.nextn.{enorm, hnorm, eh_proj, shared_head_norm}, blk.N.attn_q, ...
    Qwen3-Next, Qwen3.5    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0}

N is the number of the model's own layers. Copies of the embedding and of the head are not read: the
layer uses the model's. Of several MTP layers the first one is used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.errors import UnsupportedModelError

QWEN_NAMES = {
    "mtp.enorm": "mtp.pre_fc_norm_embedding",
    "mtp.hnorm": "mtp.pre_fc_norm_hidden",
    "mtp.eh_proj": "mtp.fc",
}


def with_mtp_layer(config: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """Returns the config with `ModelConfig.mtp` set, and the names of the layer's tensors.

    Args:
        stored: the names of the checkpoint's tensors.

    Raises:
        UnsupportedModelError: the checkpoint has no MTP layer in one of the layouts above.
    """
    number, moe = config.num_hidden_layers, config.moe
    layer = f"model.layers.{number}"
    if f"{layer}.eh_proj.weight" in stored:
        parts = "enorm", "hnorm", "eh_proj"
        names = {f"mtp.{part}": f"{layer}.{part}" for part in parts}
        names["mtp.norm"] = f"{layer}.shared_head.norm"
        pattern = rf"model\.layers\.{number}\.(?!embed_tokens\.|shared_head\.head\.)"
    elif "mtp.fc.weight" in stored:
        names, pattern = QWEN_NAMES | {layer: "mtp.layers.0"}, r"mtp\.(?!layers\.[1-9])"
    else:
        names, pattern = {}, ""
    if not names or (moe is None and config.states is None) or any(config.sliding_windows):
        raise UnsupportedModelError(
            "speculative='mtp' needs a checkpoint with the MTP layer of DeepSeek-V3, GLM-4.5,"
            f" Qwen3-Next or Qwen3.5, and this {config.architecture} has none: use 'ngram'"
        )
    stored_form = config.quantization
    if layer in names and stored_form is not None and stored_form.format != "gguf":
        raise UnsupportedModelError(
            "speculative='mtp' is not supported for this checkpoint, whose weights are stored in"
            f" {stored_form.kind}: use an unquantized checkpoint, a GGUF file, or 'ngram'"
        )
    if moe is not None and number - 1 in moe.layers:
        moe = replace(moe, layers=(*moe.layers, number))
    own = {"tensor_names": {**config.tensor_names, **names}}
    if config.ignored_tensors:
        own["ignored_tensors"] = f"(?!{pattern})(?:{config.ignored_tensors})"
    mtp = replace(
        config,
        num_hidden_layers=number + 1,
        ropes=(*config.ropes, config.ropes[-1]),
        sliding_windows=(*config.sliding_windows, None),
        moe=moe,
    )
    return replace(config, mtp=mtp, **own)
