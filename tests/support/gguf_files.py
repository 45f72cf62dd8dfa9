"""Tiny GGUF files that the `gguf` package writes from tiny transformers checkpoints.

Tensors and keys equal the output of llama.cpp's converter for the same checkpoint, including its
changes of query and key rows, norms and experts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import yaml
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import DATA, make_checkpoint

Tensors = dict[str, torch.Tensor]

WRITER: dict[str, Any] = yaml.safe_load((DATA / "gguf.yaml").read_text(encoding="utf-8"))
W123_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def make_gguf(
    path: Path,
    family: str,
    *,
    types: Callable[[str], str] = lambda name: "F32",
    keys: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    joined: bool = False,
    weights: Tensors | None = None,
    scale: str = "",
    **overrides: Any,
) -> PreTrainedModel:
    """Writes a random model of `family` to `path`, and returns it with the values of the file.

    Args:
        types: name of a matrix in the file -> its type; vectors and routers are F32.
        keys: metadata keys to replace or add; None removes a key.
        architecture: replaces the family's architecture name.
        joined: q, k and v are one tensor, and gate and up of experts are one tensor. Fused tensors
            of the checkpoint stay fused.
        weights: tensors to replace or add.
        scale: the end of the names of scales, such as ".scale": each quantized matrix has one, and
            a scale of its inputs.
        overrides: see `make_checkpoint`.
    """
    directory = path.with_suffix("")
    model = make_checkpoint(directory, family, **overrides)
    architecture = architecture or WRITER["architectures"].get(family, family)
    layers, kinds = model.config.num_hidden_layers, (KINDS.get(architecture), *MORE_TABLES)
    tables = [gguf.get_tensor_name_map(kind, layers) for kind in kinds if kind is not None]
    stored = load_file(directory / "model.safetensors") | (weights or {})
    # The position of each element in the file: the same conversion is applied to positions.
    places, flat = Tensors(), torch.cat([tensor.flatten() for tensor in stored.values()]).float()
    activations = {name: stored.pop(name) for name in [*stored] if ".act_fn." in name}
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
    for name in ("alpha_n", "alpha_p", "beta", "eps") if activations else ():
        values = [float(t) for key, t in activations.items() if key.endswith(name)]
        write_key(writer, f"xielu.{name}", values)
    tensors = converted(places, architecture, model.config, joined)
    for name, place in fuse(dict(tensors)) if joined else tensors:
        ours = gguf_name(name, tables, architecture)
        data = flat[place].numpy()
        factor = factor_of(name, model.config) if architecture == "falcon-h1" else 1.0
        data = data * factor
        is_matrix = place.dim() > 1 and not ours.endswith(tuple(WRITER["exact"]))
        kind = types(ours) if is_matrix else "F32"
        if ours.endswith(".ssm_a"):
            data = -np.exp(data)
        elif architecture in WRITER["one_plus_weight"] and ours.endswith(tuple(WRITER["norms"])):
            data = data + 1
        elif kind != "F32":
            scales = np.full((*data.shape[:-2], 1, 1), 1.0, "f4")
            if scale:
                scales = (np.arange(scales.size, dtype="f4") + 1.3).reshape(scales.shape) / 100
                for end in (scale, ".input_scale"):
                    writer.add_tensor(ours.removesuffix(".weight") + end, scales.flatten())
            data = blocks(data / scales, kind)
            read = gguf.quants.dequantize(data, Type[kind]) * scales / factor
            flat[place] = torch.from_numpy(read.astype(np.float32))
        writer.add_tensor(ours, data, raw_dtype=None if kind == "F32" else Type[kind])
    for name, factors in rope_tensors(model.config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {name: flat[place].clone() for name, place in places.items()} | activations
    save_file(read, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=model.config._attn_implementation,
        experts_implementation="eager",
    ).eval()  # fmt: skip


MORE_TABLES = [
    gguf.MODEL_ARCH[name]
    for name in ("PHI3", "DEEPSEEK2", "GEMMA4", "GLM4_MOE", "GPT_OSS", "STEP35")
]
"""Tables with tensors that converters fuse, or that the table of an architecture lacks."""
KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
ROUTER = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Tensors that the tables of the package lack."""


def factor_of(name: str, config: Any) -> Any:
    """Falcon-H1: the factor by which a tensor is multiplied in a file, or one factor per row."""
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


def gguf_name(name: str, tables: Sequence[gguf.TensorNameMap], architecture: str) -> str:
    """The name in a GGUF file of a tensor of a checkpoint, by the tables of the converter."""
    name = name.replace("correction_bias", "correction.bias").replace("dt_bias", "dt_proj.bias")
    name = name.replace("experts.e_score", "gate.e_score")
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if ".mlp.shared_expert." in name and architecture == "laguna":
        name = name.replace("shared_expert", "shared_experts")
    if part in ROUTER:
        return f"blk.{layer}.{ROUTER[part]}"
    if name.endswith((".sinks", ".layer_scalar")):
        name += ".weight"
    elif name.endswith(".expert_bias") and architecture != "hy_v3":
        name += ".bias"
    found = (table.get_name(name, try_suffixes=(".weight", ".bias")) for table in tables)
    return next(filter(None, found))


def converted(
    tensors: Tensors, architecture: str, config: Any, fused: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Converts tensors of a checkpoint to tensors of a file, except norms."""
    stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    is_tiled = architecture in WRITER["tiled"]
    for name, tensor in tensors.items():
        where = name.rpartition(".experts.")[0]

        def ends(*names: str, name: str = name) -> bool:
            return name.endswith(names)

        if expert := re.search(r"\.experts\.(\d+)\.(\w+)\.weight", name):
            prefix = re.sub(r"(block_sparse_moe|feed_forward|mixer)$", "mlp", where)
            part = W123_NAMES.get(expert[2], expert[2])
            stack = f"{prefix.replace('backbone.', 'model.')}.experts.{part}.weight"
            stacks[stack][int(expert[1])] = tensor
        elif ends("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            kind = "bias" if ends("bias") else "weight"
            # gpt-oss has [E, inputs, outputs] with gate and up outputs interleaved.
            tensor = tensor.mT if tensor.dim() > 2 and architecture == "gpt-oss" else tensor
            halves = (tensor[:, ::2], tensor[:, 1::2])
            halves = halves if architecture == "gpt-oss" else tensor.chunk(2, dim=1)
            if architecture == "gemma4":
                yield f"{name}.weight", tensor
                continue
            for part, half in zip(("gate", "up"), halves, strict=True):
                yield f"{where}.experts.{part}_proj.{kind}", half
        elif ends("experts.down_proj"):
            yield f"{name}.weight", tensor.mT if architecture == "gpt-oss" else tensor
        elif ends("experts.down_proj_bias"):
            yield f"{where}.experts.down_proj.bias", tensor
        elif ends("kv_b_proj.weight") and architecture != "minicpm3" and not fused:
            nope_dim = config.qk_nope_head_dim
            heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            yield name.replace("kv_b", "k_b"), heads[:, :nope_dim].mT.contiguous()
            yield name.replace("kv_b", "v_b"), heads[:, nope_dim:].contiguous()
        elif ends("mamba.A_log", "mixer.A_log", ".D"):
            yield name, tensor.unsqueeze(1)
        elif ends("mamba.norm.weight", "mixer.norm.weight"):
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            yield name, tensor.unflatten(0, (groups, -1))
        elif ends("input_linear.weight"):  # granitemoe: [E, 2 I, inputs]
            shared = "mlp.shared_experts" if config.num_local_experts else "mlp"
            mlp = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
            mlp = mlp.replace("shared_mlp.input_linear.weight", shared)
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"{mlp}.{part}_proj.weight", half
        elif ends("shared_mlp.output_linear.weight") and not config.num_local_experts:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        elif ends("moe_statics.e_score_correction_bias"):
            yield name, tensor.squeeze(0)
        elif ends("in_proj_qkvz.weight") and not fused:
            key_dim, heads = config.linear_key_head_dim, config.linear_num_key_heads
            rows = tensor.unflatten(0, (heads, -1))
            q, k, vz = rows.split((key_dim, key_dim, rows.shape[1] - 2 * key_dim), dim=1)
            v, z = vz.chunk(2, dim=1)
            yield name.replace("qkvz", "qkv"), torch.cat([x.flatten(0, 1) for x in (q, k, v)])
            yield name.replace("qkvz", "z"), z.flatten(0, 1)
        elif is_tiled and ".linear_attn." in name and not ends("norm.weight"):
            yield name, tiled(name, tensor, config)
        elif ends("conv1d.weight", "conv.conv.weight"):
            yield name, tensor.squeeze(1)
        elif architecture in WRITER["paired"] and re.search(r"\.[qk]_proj\.", name):
            is_key = ".k_proj." in name
            heads = config.num_key_value_heads if is_key else config.num_attention_heads
            yield name, tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        else:
            yield name, tensor
    for name, stack in stacks.items():
        yield name, torch.stack([stack[n] for n in range(len(stack))])


def fuse(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Fuses q, k and v into one tensor, and gate and up of all experts. In models with linear
    attention the name of the fused q, k and v is already in use."""
    has_linear = any(".linear_attn." in name for name in tensors)
    for name, tensor in tensors.items():
        parts = ("gate_proj", "up_proj") if ".experts." in name else ("q_proj", "k_proj", "v_proj")
        part, fused = name.split(".")[-2], "gate_up_proj" if ".experts." in name else "qkv_proj"
        if part not in parts or (has_linear and fused == "qkv_proj"):
            yield name, tensor
        elif part == parts[0]:
            rows = [tensors[name.replace(part, each)] for each in parts]
            yield name.replace(part, fused), torch.cat(rows, dim=int(fused == "gate_up_proj"))


def tiled(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Reorders value heads: the first value head of each key head, then the second of each, ..."""
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    ratio = config.linear_num_value_heads // key_heads
    tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
    if name.endswith("out_proj.weight"):
        return tensor.unflatten(1, (key_heads, ratio, -1)).transpose(1, 2).flatten(1)
    keys = 2 * key_heads * key_dim if "qkv" in name or "conv1d" in name else 0
    values = tensor[keys:].unflatten(0, (key_heads, ratio, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((tensor[:keys], values))


def metadata(config: Any, architecture: str) -> dict[str, Any]:
    """The metadata keys for a config, without the architecture prefix; None: the key is absent."""
    given, rope = config.to_dict(), dict(getattr(config, "rope_parameters", None) or {})
    sliding = rope.get("sliding_attention", {}).get("rope_theta")
    rope = rope.get("full_attention", rope)
    head_dim = given.get("head_dim")
    found: dict[str, Any] = {}
    for key, theirs in WRITER["keys"].items():
        values = map(given.get, theirs.split())
        found[key] = next((value for value in values if value is not None), None)
    found |= dict.fromkeys(WRITER["unwritten"].get(architecture, "").split())
    found["block_count"] = config.num_hidden_layers
    if architecture in WRITER["no_head_dim"]:
        found["attention.key_length"] = found["attention.value_length"] = None
    found |= {"rope.freq_base": rope.get("rope_theta"), "rope.freq_base_swa": sliding}
    if architecture in WRITER["rotary"]:
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
    if architecture in WRITER["inner_sizes"]:
        found[WRITER["inner_sizes"][architecture]] = config.intermediate_size
    if architecture in WRITER["normed"]:
        found["expert_weights_norm"] = config.norm_topk_prob
    if "qk_rope_head_dim" in given:
        found["rope.dimension_count"] = config.qk_rope_head_dim
    if architecture in WRITER["sigmoid"]:
        found["expert_gating_func"] = 2
    if architecture in (*WRITER["tiled"], "qwen2vl", "qwen3vl", "qwen3vlmoe"):
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if architecture.startswith("qwen3vl"):
        found["n_deepstack_layers"] = 3
    window, kinds = given.get("sliding_window"), given.get("layer_types")
    if window is not None and architecture in WRITER["windows"]:
        found["attention.sliding_window"] = window
        if architecture in WRITER["patterns"]:
            pattern = [kind == "sliding_attention" for kind in kinds]
            found["attention.sliding_window_pattern"] = pattern
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
        found["ssm.inner_size"] = config.mamba_num_heads * config.mamba_head_dim
        size = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
        found["feed_forward_length"] = [size * (kind in ("moe", "mlp")) for kind in kinds]
        if "moe" not in kinds:
            found = {key: value for key, value in found.items() if "expert" not in key}
    if architecture == "minicpm3":
        found["attention.key_length"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        found["attention.value_length"] = None
    elif architecture in ("afmoe", "laguna"):
        found["expert_weights_norm"] = True
    if architecture == "granite_swa":
        found["attention.rope_pattern"] = [theta > 0 for theta in config.layer_rope_theta]
        found["rope.freq_base"] = max(config.layer_rope_theta)
    elif architecture == "laguna":
        found["attention.head_count"] = config.num_attention_heads_per_layer
        found["leading_dense_block_count"] = config.mlp_layer_types.count("dense")
        found["rope.dimension_count_swa"] = config.head_dim
    elif architecture == "exaone-moe":
        shared = config.num_shared_experts * config.moe_intermediate_size
        found["expert_shared_feed_forward_length"] = shared
    if architecture == "deepseek2":
        found |= mla_keys(config, given)
    elif architecture == "gemma4":
        found |= gemma4_keys(given)
    elif architecture == "hy_v3":
        shared = config.num_shared_experts * config.moe_intermediate_size
        found["expert_shared_feed_forward_length"] = shared
        found["expert_weights_norm"] = True
    if architecture == "phi3":
        found["rope.scaling.original_context_length"] = given.get(
            "original_max_position_embeddings", 4096
        )
    if "long_factor" in rope:
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        grown = math.log(scale) / math.log(rope["original_max_position_embeddings"])
        found["rope.scaling.attn_factor"] = math.sqrt(1 + grown)
    return found


def mla_keys(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Additional keys for MLA: its sizes as one wide KV head, and the sizes of the actual heads."""
    moe, rope = given.get("n_routed_experts"), config.rope_parameters or {}
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_weights_norm": given.get("norm_topk_prob") or None,
        "expert_gating_func": 2 if moe and config.model_type == "deepseek_v3" else None,
    }
    if not moe:
        found["leading_dense_block_count"] = config.num_hidden_layers
        found["expert_feed_forward_length"] = config.intermediate_size
        found["expert_shared_count"] = 0
    if "mlp_layer_types" in given:
        found["leading_dense_block_count"] = given["mlp_layer_types"].index("sparse")
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def gemma4_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The per-layer keys of Gemma 4."""
    kinds, shared = given["layer_types"], given["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in kinds]
    full_layer = next(iter(given["per_layer_config"].values()))
    inner, heads = given["intermediate_size"], given["num_key_value_heads"]
    found = {
        "attention.key_length": full_layer["head_dim"],
        "attention.value_length": full_layer["head_dim"],
        "attention.key_length_swa": given["head_dim"],
        "attention.value_length_swa": given["head_dim"],
        "rope.dimension_count": full_layer["head_dim"],
        "rope.dimension_count_swa": given["head_dim"],
    }
    if given["use_double_wide_mlp"]:
        first = len(kinds) - shared
        found["feed_forward_length"] = [inner * (1 + (n >= first)) for n in range(len(kinds))]
    if "num_key_value_heads" in full_layer:
        full = full_layer["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if slide else full for slide in slides]
    return found


def rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """Tensors with divisors of RoPE frequencies."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_factor" in rope:
        factors = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {
            f"rope_factors_{name}.weight": np.array(each, np.float32)
            for name, each in factors.items()
        }
    if "proportional" in str(rope):
        pairs = next(iter(config.to_dict()["per_layer_config"].values()))["head_dim"] // 2
        rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        factors = [1.0] * rotated + [1e30] * (pairs - rotated)
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((original / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)}


def blocks(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes rows to blocks of a type. If the package cannot quantize to the type, blocks are
    random, with mean 0 and about the same standard deviation."""
    if kind not in RANDOM:
        return gguf.quants.quantize(numbers, Type[kind])
    offset, ratio = RANDOM[kind]
    inputs, size = gguf.constants.GGML_QUANT_SIZES[Type[kind]]
    random = np.random.default_rng(numbers.size)
    shape = (*numbers.shape[:-1], numbers.shape[-1] // inputs)
    raw = random.integers(0, 256, (*shape, size), np.uint8)
    scale = 1.0
    for _ in range(2):  # The second pass uses the measured scale.
        for part, number in ((offset, scale), (offset + 2, scale * (ratio or 0))):
            if ratio or part == offset:
                write_float16(raw, kind, part, np.array(number))
        read = gguf.quants.dequantize(raw.reshape(*shape[:-1], -1), Type[kind])
        scale = numbers.std() / read.std()
    return raw.reshape(*shape[:-1], -1)


def write_float16(raw: np.ndarray, kind: str, offset: int, values: np.ndarray) -> None:
    """Writes values into blocks [..., bytes] at a byte; IQ1_M has 4 bits in each of 4 bytes, NVFP4
    has 4 e4m3 floats, which become different ones near the value."""
    if kind == "NVFP4":
        near = torch.tensor(values, dtype=torch.float).to(torch.float8_e4m3fn)
        raw[..., :4] = raw[..., :4] % 3 + near.view(torch.uint8).numpy()
        return
    stored = values.astype("<f2")[..., None]
    if kind != "IQ1_M":
        raw[..., offset : offset + 2] = stored.view("u1")
        return
    parts = stored.view("u2") >> np.arange(0, 16, 4, dtype="u2") & 15
    raw[..., 49::2] = raw[..., 49::2] & 15 | parts.astype("u1") << 4


RANDOM: dict[str, tuple[int, float | None]] = {
    "Q2_K": (80, 1.5), "Q3_K": (108, None), "Q4_K": (0, 7.5), "Q5_K": (0, 15.5),
    "Q6_K": (208, None), "IQ4_NL": (0, None), "IQ4_XS": (0, None),
    "IQ1_S": (0, None), "IQ1_M": (0, None), "IQ2_XXS": (0, None), "IQ2_XS": (0, None),
    "IQ2_S": (0, None), "IQ3_XXS": (0, None), "IQ3_S": (0, None), "NVFP4": (0, None),
}  # fmt: skip
"""Type that the package cannot quantize to -> offset of the float16 scale in a block, and the ratio
of the scale of the mins, which follows it, to this scale. The ratio makes the mean 0."""


def write_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Writes a value with the type that llama.cpp's converter uses."""
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
