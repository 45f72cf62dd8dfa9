"""Tiny GGUF files, made of tiny checkpoints of transformers by the `gguf` package.

Tensors and keys are those that llama.cpp's converter writes for the same checkpoint; rows of
queries and keys, norms and experts change as they do there.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.wg": "ffn_gate_inp", "mlp.moe_statics.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp", "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b", "feed_forward.expert_bias": "exp_probs_b",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
    "self_attn.gate_proj": "attn_gate", "mlp.router.gate": "ffn_gate_inp",
    "mlp.e_score_correction_bias": "exp_probs_b", "mlp.expert_bias": "exp_probs_b",
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out", "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down", "model.final_layernorm": "output_norm",
    "model.embeddings": "token_embd", "model.norm_f": "output_norm", "norm": "attn_norm",
    "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
BEHIND = {"post_attention_layernorm": "post_attention_norm"}
BOTH = BEHIND | {
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
AFMOE = BEHIND | {"pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"}
GLM = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}

ARCHITECTURES: dict[str, tuple[str, dict[str, str]]] = {
    "afmoe": ("afmoe", AFMOE), "bamba": ("granitehybrid", {}),
    "deepseek_v2": ("deepseek2", {}), "deepseek_v3": ("deepseek2", {}),
    "exaone_moe": ("exaone-moe", {}), "falcon_h1": ("falcon-h1", {}),
    "gemma4": ("gemma4", BOTH), "gemma4_moe": ("gemma4", BOTH),
    "glm4_moe_lite": ("deepseek2", {}), "granite_hybrid": ("granitehybrid", {}),
    "nemotron_h": ("nemotron_h_moe", {}), "phi": ("phi2", {}), "solar_open": ("glm4moe", BEHIND),
    "youtu": ("deepseek2", {}),
    "cohere": ("command-r", {}), "exaone4": ("exaone4", BOTH), "gemma2": ("gemma2", BOTH),
    "gemma3": ("gemma3", BOTH), "glm": ("chatglm", {}), "glm4": ("glm4", GLM),
    "glm4_moe": ("glm4moe", BEHIND), "gpt_oss": ("gpt-oss", BEHIND),
    "ernie4_5_moe": ("ernie4_5-moe", {}), "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoe", {}), "hunyuan_moe": ("hunyuan-moe", {}),
    "hunyuan": ("hunyuan-dense", {}),
    "lfm2_moe": ("lfm2moe", {}), "minimax_m2": ("minimax-m2", {}), "ministral3": ("mistral3", {}),
    "mistral": ("llama", {}), "mixtral": ("llama", {}),
    "olmo2": ("olmo2", BOTH), "olmo3": ("olmo2", BOTH), "qwen2_moe": ("qwen2moe", {}),
    "qwen3_5": ("qwen35", BEHIND), "qwen3_5_moe": ("qwen35moe", BEHIND),
    "qwen3_moe": ("qwen3moe", {}), "qwen3_next": ("qwen3next", BEHIND),
    "seed_oss": ("seed_oss", BEHIND),
}  # fmt: skip
"""Family -> its `general.architecture`, where it has another name, and names of its own."""

PAIRED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3", "internlm2",
          "granitehybrid", "nemotron_h", "nemotron_h_moe")  # fmt: skip
"""Architectures whose queries and keys are stored so that neighbours turn together."""
TILED = ("qwen35", "qwen35moe")
"""Those whose value heads of linear attention lie in another order."""
CENTERED = ("gemma", "nemotron", "gemma2", "gemma3", "qwen3next", *TILED)
"""Those whose norms are stored plus 1."""
EXACT = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "shortconv.conv.weight",
    "ssm_conv1d.weight",
    "ssm_norm.weight",
    ".ssm_a",
    ".ssm_d",
)
"""Matrices that converters never quantize."""
NORMS = ("attn_norm.weight", "ffn_norm.weight", "output_norm.weight", "attention_norm.weight",
         "post_ffw_norm.weight", "q_norm.weight", "k_norm.weight")  # fmt: skip
NO_HEAD_DIM = ("granite", "granitemoe", "phi3", "chatglm")
TURNED = (
    *PAIRED, *TILED, "qwen3next", "phi3", "chatglm", "glm4", "glm4moe", "cohere2", "minimax-m2",
    "stablelm", "jais2", "nemotron", "phi2", "afmoe",
)  # fmt: skip
"""Those that say how many dimensions of a head turn."""
WINDOWS = ("gemma2", "gemma3", "gpt-oss", "olmo2", "exaone4", "phi3", "cohere2", "phimoe",
           "gemma4", "afmoe", "exaone-moe", "mellum")  # fmt: skip
PATTERNS = ("olmo2", "exaone4", "gemma4", "exaone-moe", "mellum")
SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
INNER = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED = INNER | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ROUTED = INNER | {
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip
SIGMOID = ("dots1", "glm4moe", "lfm2moe", "minimax-m2", "exaone-moe", "hy_v3", "afmoe")
"""Those whose files name the scores of routers."""
LATENT = {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"}
FURTHER = {
    "afmoe": INNER
    | {
        "expert_shared_count": "num_shared_experts",
        "leading_dense_block_count": "num_dense_layers",
        "expert_weights_scale": "route_scale",
    },
    "deepseek2": LATENT,
    "exaone-moe": {**ROUTED, "expert_shared_count": "num_shared_experts"},
    "falcon-h1": MAMBA | {"ssm.inner_size": "mamba_d_ssm"},
    "gemma4": {
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "granitehybrid": MAMBA | SCALES,
    "hy_v3": INNER | {"expert_weights_scale": "router_scaling_factor"},
    "mellum": INNER,
    "minicpm3": LATENT | {"attention.q_lora_rank": "q_lora_rank"},
    "nemotron_h": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt-oss": {"expert_feed_forward_length": "intermediate_size"},
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "qwen3moe": INNER,
    "qwen3vlmoe": INNER,
    "qwen2moe": SHARED,
    "qwen35": DELTA,
    "qwen35moe": DELTA | SHARED,
    "qwen3next": DELTA | SHARED,
    "dots1": ROUTED,
    "glm4moe": ROUTED,
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2moe": INNER
    | {"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
    "command-r": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale"},
    "ernie4_5-moe": INNER
    | {
        "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    "hunyuan-moe": {"expert_shared_feed_forward_length": "intermediate_size"},
    "granite": SCALES,
    "granitemoe": SCALES,
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}
FURTHER["nemotron_h_moe"] = FURTHER["nemotron_h"] | {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts", "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}  # fmt: skip
"""Architecture -> further keys, and what they are called in the config."""
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TAKEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def make_gguf(
    path: Path,
    family: str,
    *,
    types: Callable[[str], str] = lambda name: "F32",
    keys: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    joined: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Writes a random model of `family` to `path`, and returns it with the numbers that are there.

    Args:
        types: a matrix's name in the file -> its type; vectors and routers stay F32.
        keys: of the metadata, in place of others or besides; None: left out.
        architecture: in place of the family's, of which it is another name.
        joined: rows of q, k and v, and of experts' gate and up, are one tensor each; those of a
            merged checkpoint stay so.
        overrides: see `make_checkpoint`.
    """
    directory = path.with_suffix("")
    model = make_checkpoint(directory, family, **overrides)
    own, names = ARCHITECTURES.get(family, (family, {}))
    architecture = architecture or own
    stored = load_file(directory / "model.safetensors")
    # Where each number goes: the same changes, made to places.
    places, flat = Tensors(), torch.cat([tensor.flatten() for tensor in stored.values()]).float()
    for name, tensor in stored.items():
        first = sum(place.numel() for place in places.values())
        places[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
    writer = gguf.GGUFWriter(path, architecture)
    written = {f"{architecture}.{k}": v for k, v in metadata(model.config, architecture).items()}
    written |= {k if "general." in k or "tokenizer." in k else f"{architecture}.{k}": v
                for k, v in (keys or {}).items()}  # fmt: skip
    for key, value in written.items():
        if value is not None:
            write_key(writer, key, value)
    tensors = converted(places, architecture, model.config, joined)
    for name, place in together(dict(tensors)) if joined else tensors:
        ours = gguf_name(name, NAMES | names, architecture)
        data = flat[place].numpy()
        factor = factor_of(name, model.config) if architecture == "falcon-h1" else 1.0
        data = data * factor
        is_matrix = place.dim() > 1 and not ours.endswith((*EXACT, ".bias"))
        kind = types(ours) if is_matrix else "F32"
        if ours.endswith(".ssm_a"):
            data = -np.exp(data)
        elif architecture in CENTERED and ours.endswith(NORMS):
            data = data + 1
        elif kind != "F32":
            data = blocks(data, kind)
            read = gguf.quants.dequantize(data, Type[kind]) / factor
            flat[place] = torch.from_numpy(read.astype(np.float32))
        writer.add_tensor(ours, data, raw_dtype=None if kind == "F32" else Type[kind])
    for name, factors in rotations(model.config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {name: flat[place].clone() for name, place in places.items()}
    save_file(read, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=model.config._attn_implementation,
        experts_implementation="eager",
    ).eval()  # fmt: skip


MAMBA_PARTS = ("in_proj", "out_proj", "dt_bias")
VECTORS = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def factor_of(name: str, config: Any) -> Any:
    """By what Falcon-H1's numbers are multiplied in a file: a number, or one for each row."""
    gate, down = config.mlp_multipliers
    factors = {
        "gate_proj": gate, "down_proj": down, "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier, "out_proj": config.ssm_out_multiplier,
        "o_proj": config.attention_out_multiplier,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.attention_in_multiplier),
    }  # fmt: skip
    part = name.split(".")[-2]
    if part == "in_proj":
        keys = config.mamba_n_groups * config.mamba_d_state
        sizes = config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads
        rows = np.repeat(config.ssm_multipliers, sizes) * config.ssm_in_multiplier
        return rows[:, None].astype(np.float32)
    found = factors.get(part, 1.0)
    return np.float32(found * config.key_multiplier if part == "k_proj" else found)


UNNAMED = {"falcon-h1": ("ffn_norm",), "hy_v3": ("exp_probs_b",)}
"""Architecture -> names that have no ".weight" and no ".bias" behind them."""


def gguf_name(name: str, names: Mapping[str, str], architecture: str) -> str:
    """What a checkpoint's tensor is called in a GGUF file."""
    name = name.replace("backbone.", "model.")
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    rest = name[layer.end() :] if layer else name
    stem, _, end = rest.rpartition(".")
    if end in VECTORS and layer:  # of which a layer's own name is no part
        return f"blk.{layer[1]}.{VECTORS[end]}"
    if names.get(rest, "").endswith(".scale"):
        return f"blk.{layer[1]}.{names[rest]}"
    if names.get(stem) in UNNAMED.get(architecture, ()) or names.get(rest) in UNNAMED.get(
        architecture, ()
    ):
        return f"blk.{layer[1]}.{names.get(stem) or names[rest]}"
    if end not in ("weight", "bias"):
        stem, end = rest, "bias" if "bias" in end else "weight"
    return f"blk.{layer[1]}.{names[stem]}.{end}" if layer else f"{names[stem]}.{end}"


def converted(
    tensors: Tensors, architecture: str, config: Any, merged: bool
) -> Iterator[tuple[str, Any]]:
    """The tensors that a file holds in place of a checkpoint's; norms are as they were."""
    stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        where = name.rpartition(".experts.")[0] or name.rpartition(".")[0]
        if expert := re.search(r"\.experts\.(\d+)\.(\w+)\.weight", name):
            beside = re.sub(r"(block_sparse_moe|feed_forward|mixer)$", "mlp", where)
            part = NUMBERED.get(expert[2], expert[2])
            stacks[f"{beside}.experts.{part}.weight"][int(expert[1])] = tensor
        elif name.endswith("experts.gate_up_proj") and architecture == "gemma4":
            yield f"{name}.weight", tensor
        elif name.endswith("kv_b_proj.weight") and architecture != "minicpm3" and not merged:
            still = config.qk_nope_head_dim
            of_heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            yield name.replace("kv_b", "k_b"), of_heads[:, :still].mT.contiguous()
            yield name.replace("kv_b", "v_b"), of_heads[:, still:].contiguous()
        elif name.endswith(("mamba.A_log", "mixer.A_log", ".D")):
            yield name, tensor.unsqueeze(1)
        elif re.search(r"\.(mamba|mixer)\.conv1d\.", name):
            squeezed = tensor.squeeze(1) if name.endswith("weight") else tensor
            yield name.replace("mixer", "mamba"), squeezed
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            yield name.replace("mixer", "mamba"), tensor.unflatten(0, (groups, -1))
        elif ".mixer." in name and ".experts." not in name:
            part = name.split(".mixer.")[1].split(".")[0]
            place = "mamba" if part in MAMBA_PARTS else "mlp"
            place = "self_attn" if re.fullmatch("[qkvo]_proj", part) else place
            if part in "q_proj k_proj":
                heads = config.num_attention_heads
                heads = config.num_key_value_heads if part == "k_proj" else heads
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            yield name.replace("mixer", place), tensor
        elif name.endswith("experts.gate_up_proj") and architecture != "gpt-oss":
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{where}.experts.{part}_proj.weight", half
        elif name.endswith("experts.gate_up_proj"):  # [E, inputs, outputs]
            yield f"{where}.experts.gate_proj.weight", tensor.mT[:, ::2]
            yield f"{where}.experts.up_proj.weight", tensor.mT[:, 1::2]
        elif name.endswith("experts.gate_up_proj_bias"):
            yield f"{where}.experts.gate_proj.bias", tensor[:, ::2]
            yield f"{where}.experts.up_proj.bias", tensor[:, 1::2]
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.mT if architecture == "gpt-oss" else tensor
        elif name.endswith("experts.down_proj_bias"):
            yield f"{where}.experts.down_proj.bias", tensor
        elif name.endswith("input_linear.weight"):  # granitemoe: [E, 2 I, inputs]
            mlp = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
            shared = "mlp.shared_experts" if config.num_local_experts else "mlp"
            mlp = mlp.replace("shared_mlp.input_linear.weight", shared)
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"{mlp}.{part}_proj.weight", half
        elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        elif name.endswith("moe_statics.e_score_correction_bias"):
            yield name, tensor.squeeze(0)
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            ours = "mlp.experts.down_proj.weight"
            yield name.replace("block_sparse_moe.output_linear.weight", ours), tensor
        elif name.endswith("in_proj_qkvz.weight") and not merged:
            key_dim, heads = config.linear_key_head_dim, config.linear_num_key_heads
            own = tensor.unflatten(0, (heads, -1))
            q, k, vz = own.split((key_dim, key_dim, own.shape[1] - 2 * key_dim), dim=1)
            v, z = vz.chunk(2, dim=1)
            qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            yield name.replace("qkvz", "qkv"), qkv
            yield name.replace("qkvz", "z"), z.flatten(0, 1)
        elif name.endswith("linear_attn.conv1d.weight") and architecture not in TILED:
            yield name, tensor.squeeze(1)
        elif (
            architecture in TILED
            and ".linear_attn." in name
            and not name.endswith("linear_attn.norm.weight")
        ):
            yield name, tiled(name, tensor, config)
        elif name.endswith("conv.conv.weight"):
            yield name, tensor.squeeze(1)
        elif architecture in PAIRED and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads
            if ".k_proj." in name:
                heads = config.num_key_value_heads
            yield name, tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        else:
            yield name, tensor
    for name, stack in stacks.items():
        yield name, torch.stack([stack[n] for n in range(len(stack))])


def together(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """With one tensor for q, k and v, and one for gate and up of all experts. In a model with
    linear attention the first of these names is taken."""
    linear = any(".linear_attn." in name for name in tensors)
    for name, tensor in tensors.items():
        parts = ("gate_proj", "up_proj") if ".experts." in name else ("q_proj", "k_proj", "v_proj")
        own, one = name.split(".")[-2], "gate_up_proj" if ".experts." in name else "qkv_proj"
        if own not in parts or (linear and one == "qkv_proj"):
            yield name, tensor
        elif own == parts[0]:
            each = [tensors[name.replace(own, part)] for part in parts]
            yield name.replace(own, one), torch.cat(each, dim=int(one == "gate_up_proj"))


def tiled(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Value heads one of each key head after the other, of a layer with linear attention."""
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // key_heads
    tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
    if name.endswith("out_proj.weight"):
        return tensor.unflatten(1, (key_heads, each, -1)).transpose(1, 2).flatten(1)
    keys = 2 * key_heads * key_dim if "qkv" in name or "conv1d" in name else 0
    values = tensor[keys:].unflatten(0, (key_heads, each, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((tensor[:keys], values))


def metadata(config: Any, architecture: str) -> dict[str, Any]:
    """The keys of a config, without the architecture before them; None: left out."""
    given, rope = config.to_dict(), dict(getattr(config, "rope_parameters", None) or {})
    sliding = rope.get("sliding_attention", {}).get("rope_theta")
    rope = rope.get("full_attention", rope)
    head_dim = given.get("head_dim")
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": given.get("intermediate_size"),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": None if architecture in NO_HEAD_DIM else head_dim,
        "attention.value_length": None if architecture in NO_HEAD_DIM else head_dim,
        "attention.layer_norm_rms_epsilon": given.get("norm_eps", given.get("rms_norm_eps")),
        "attention.layer_norm_epsilon": given.get("layer_norm_eps"),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": sliding,
        "expert_count": next((given[key] for key in COUNTS if given.get(key)), None),
        "expert_used_count": next((given[key] for key in TAKEN if given.get(key)), None),
        "expert_shared_feed_forward_length": given.get("shared_intermediate_size"),
    }
    if architecture in TURNED:
        size = head_dim or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1))
    if "alpha" in rope:
        size = head_dim or config.hidden_size // config.num_attention_heads
        found["rope.freq_base"] *= rope["alpha"] ** (size / (size - 2))
        found["rope.scaling.type"] = "none"
    if rope.get("rope_type") in ("linear", "yarn"):
        kind = {
            "type": rope["rope_type"],
            "factor": rope["factor"],
            "original_context_length": rope.get("original_max_position_embeddings"),
            "yarn_beta_fast": rope.get("beta_fast"),
            "yarn_beta_slow": rope.get("beta_slow"),
        }
        found |= {f"rope.scaling.{key}": value for key, value in kind.items()}  # fmt: skip
    if "llama_4_scaling_beta" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture in SIGMOID:
        found["expert_gating_func"] = 2
    if architecture in (*TILED, "qwen2vl", "qwen3vl", "qwen3vlmoe"):
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if architecture.startswith("qwen3vl"):
        found["n_deepstack_layers"] = 3
    window, kinds = given.get("sliding_window"), given.get("layer_types")
    if window is not None and architecture in WINDOWS:
        found["attention.sliding_window"] = window
        if architecture in PATTERNS:
            pattern = [kind == "sliding_attention" for kind in kinds]
            found["attention.sliding_window_pattern"] = pattern
    for key, name in FURTHER.get(architecture, {}).items():
        found[key] = given.get(name) if name in SCALES.values() else given[name]
    if architecture.startswith("lfm2"):
        kv_heads = found["attention.head_count_kv"]
        found["attention.head_count_kv"] = [kv_heads * (kind != "conv") for kind in kinds]
    if architecture == "lfm2":
        inner = int(2 * config.intermediate_size / 3)
        multiple = config.block_multiple_of
        found["feed_forward_length"] = multiple * -(-inner // multiple)
    if hasattr(config, "linear_num_value_heads"):
        found["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
        found["full_attention_interval"] = given.get("full_attention_interval", 4)
    if architecture == "granitehybrid":
        kinds = kinds or config.layers_block_type
        found["attention.head_count_kv"] = [
            config.num_key_value_heads * (kind in ("full_attention", "attention")) for kind in kinds
        ]
        found["ssm.inner_size"] = config.mamba_expand * config.hidden_size
        found["rope.scaling.finetuned"] = config.model_type == "bamba"
        found["rope.dimension_count"] = config.hidden_size // config.num_attention_heads
        if config.model_type == "bamba":
            found["rope.dimension_count"] //= 2
    elif architecture.startswith("nemotron_h"):
        kinds = given["layers_block_type"]
        found["attention.head_count_kv"] = [
            config.num_key_value_heads * (kind == "full_attention") for kind in kinds
        ]
        found["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
        found["ssm.inner_size"] = config.mamba_num_heads * config.mamba_head_dim
        size = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
        found["feed_forward_length"] = [size * (kind in ("moe", "mlp")) for kind in kinds]
        if "moe" not in kinds:
            found["expert_count"] = found["expert_used_count"] = None
    if architecture in ("phimoe", "starcoder2", "nemotron"):
        found["attention.layer_norm_epsilon"] = given.get("norm_epsilon", given.get("norm_eps"))
    if architecture == "deepseek2":
        found |= latent_keys(config, given)
    elif architecture == "minicpm3":
        found["attention.key_length"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        found["attention.value_length"] = None
    elif architecture == "gemma4":
        found |= gemma4_keys(given)
    elif architecture == "hy_v3":
        shared = config.num_shared_experts * config.moe_intermediate_size
        found["expert_shared_feed_forward_length"] = shared
        found["expert_weights_norm"] = True
    elif architecture == "afmoe":
        found["expert_weights_norm"] = True
    elif architecture == "exaone-moe":
        shared = config.num_shared_experts * config.moe_intermediate_size
        found["expert_shared_feed_forward_length"] = shared
    if architecture in ("phi3", "phimoe"):
        found["rope.scaling.original_context_length"] = given.get(
            "original_max_position_embeddings", 4096
        )
    if "long_factor" in rope:
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        grown = math.log(scale) / math.log(rope["original_max_position_embeddings"])
        found["rope.scaling.attn_factor"] = math.sqrt(1 + grown)
    return found


def latent_keys(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What files of DeepSeek's attention have besides: sizes of one wide KV head, and of heads as
    they are."""
    moe, rope = given.get("n_routed_experts"), config.rope_parameters or {}
    found = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": given.get("q_lora_rank"),
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "leading_dense_block_count": given.get("first_k_dense_replace", config.num_hidden_layers),
        "expert_feed_forward_length": given.get("moe_intermediate_size", config.intermediate_size),
        "expert_shared_count": given.get("n_shared_experts", 0),
        "expert_group_count": given.get("n_group"),
        "expert_group_used_count": given.get("topk_group"),
        "expert_weights_scale": given.get("routed_scaling_factor"),
        "expert_weights_norm": given.get("norm_topk_prob") or None,
        "expert_gating_func": (2 if moe and config.model_type == "deepseek_v3" else None),
    }
    if "mlp_layer_types" in given:
        found["leading_dense_block_count"] = given["mlp_layer_types"].index("sparse")
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def gemma4_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from layer to layer of Gemma 4."""
    kinds, shared = given["layer_types"], given["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in kinds]
    own = next(iter(given["per_layer_config"].values()))
    inner, heads = given["intermediate_size"], given["num_key_value_heads"]
    found = {
        "attention.key_length": own["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.key_length_swa": given["head_dim"],
        "attention.value_length_swa": given["head_dim"],
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": given["head_dim"],
    }
    if given["use_double_wide_mlp"]:
        first = len(kinds) - shared
        found["feed_forward_length"] = [inner * (1 + (n >= first)) for n in range(len(kinds))]
    if "num_key_value_heads" in own:
        full = own["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if slide else full for slide in slides]
    return found


def rotations(config: Any) -> dict[str, np.ndarray]:
    """Tensors that slow the rotation."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_factor" in rope:
        factors = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {
            f"rope_factors_{name}.weight": np.array(each, np.float32)
            for name, each in factors.items()
        }
    if "proportional" in str(rope):
        own = next(iter(config.to_dict()["per_layer_config"].values()))["head_dim"] // 2
        turned = int(own * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (own - turned), np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((original / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)}


def blocks(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks of a type: of the numbers, or where the package has no writer for the type, of
    random ones of mean 0 and about the same size."""
    if kind not in RANDOM:
        return gguf.quants.quantize(numbers, Type[kind])
    place, ratio = RANDOM[kind]
    inputs, size = gguf.constants.GGML_QUANT_SIZES[Type[kind]]
    random = np.random.default_rng(numbers.size)
    shape = (*numbers.shape[:-1], numbers.shape[-1] // inputs)
    raw = random.integers(0, 256, (*shape, size), np.uint8)
    scale = 1.0
    for _ in range(2):  # the second time with the size that was found
        for part, number in ((place, scale), (place + 2, scale * (ratio or 0))):
            if ratio or part == place:
                raw[..., part : part + 2] = np.array([number], "<f2").view(np.uint8)
        read = gguf.quants.dequantize(raw.reshape(*shape[:-1], -1), Type[kind])
        scale = numbers.std() / read.std()
    return raw.reshape(*shape[:-1], -1)


RANDOM: dict[str, tuple[int, float | None]] = {
    "Q2_K": (80, 1.5), "Q3_K": (108, None), "Q4_K": (0, 7.5), "Q5_K": (0, 15.5),
    "Q6_K": (208, None), "IQ4_NL": (0, None), "IQ4_XS": (0, None),
}  # fmt: skip
"""Type without a writer -> where the float16 scale of a block is, and how much larger the scale of
its mins must be, which is behind it, so that the mean is 0."""


def write_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A value as the kind that llama.cpp's converter gives it."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
