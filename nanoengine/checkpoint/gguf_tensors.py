"""GGUFModel: the tensors of a GGUF file by our names, with the transforms to apply on reading.

Some files store the rows of queries and keys in another order than the original checkpoint. Reading
restores the original order, so models and kernels need no special case. Called by `files.py` and
`gguf_models.py`; knows neither layers nor how quantized blocks are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from nanoengine.checkpoint.families import gguf_families
from nanoengine.checkpoint.gguf import FLOATS, GGUFTensor, StoredRows, read_gguf, read_rows
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from nanoengine.settings.checks import join_names, quoted

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are read with the config."""

# fmt: off
MATRICES = ("gate", "up", "down")
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_output_norm", "post_ffw_norm": "mlp_output_norm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in MATRICES},
    **{f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in MATRICES},
    **{f"ffn_{x}_exps.bias": f"mlp.experts.{x}_proj_bias" for x in MATRICES},
    **{f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in MATRICES},
    "ffn_gate_up_exps": "mlp.experts.{}.{}_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "token_embd_norm": "model.norm",
    **{f"nextn.{x}": x for x in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
    **{f"nextn.shared_head_{x}": f"shared_head.{x}" for x in ("norm", "head")},
}
"""Name of a tensor in the file, without the layer prefix and usually without ".weight" -> our name.
{} is the index of an expert in a stack; with two {}, the stack has both gate and up rows."""
SPLIT_TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "attn_qkv": {"self_attn.q_proj": (0,), "self_attn.k_proj": (1,), "self_attn.v_proj": (2,)},
    "ssm_in": {"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)},
    "ssm_ba": {"linear_attn.in_proj_b": (0,), "linear_attn.in_proj_a": (1,)},
}
"""Tensor that contains several of ours -> our names, each with the indices of its parts of the rows
(see `GGUFModel._part_sizes`). Not used if the architecture has its own name for the tensor."""
# fmt: on

Transform = Callable[[torch.Tensor], torch.Tensor]


class Entry(NamedTuple):
    """The source of one of our tensors in a GGUF file.

    Attributes:
        tensor: its location; in a stack of experts, the matrix of one expert.
        shape: the shape that layers expect.
        transforms: functions that are applied to its rows, in this order, when they are read.
    """

    tensor: GGUFTensor
    shape: tuple[int, ...]
    transforms: tuple[Transform, ...] = ()


class GGUFModel:
    """One GGUF file, or set of files, of a supported architecture. `keep`: see `read_gguf`.

    Attributes:
        architecture: the name that a config.json of this model has in `architectures`.
        differences: the differences between GGUF files and checkpoints of this family.

    Raises:
        UnsupportedModelError: the architecture is unknown, or the file is not a language model.
        WeightLoadError: the file is damaged.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        raw, self.tensors = read_gguf(path, keep=keep)
        self.metadata = metadata = Metadata(path, raw, self.tensors)
        kind, every = metadata.read("general.type", str, "model"), gguf_families()
        known = sorted({name for family in every.values() for name in family.gguf})
        if kind != "model" or metadata.architecture not in known:
            what = {"architecture": metadata.architecture} if kind == "model" else {"type": kind}
            ((key, value),) = what.items()
            raise UnsupportedModelError(
                f"{path} has general.{key}={quoted(value)}; supported are language models of"
                f" {join_names(known, like=metadata.architecture)}"
            )
        own = metadata.architecture
        found = [(name, family.gguf[own]) for name, family in every.items() if own in family.gguf]
        matching = [one for one in found if one[1].when is not None and one[1].when(metadata)]
        matching = matching or [one for one in found if one[1].when is None]
        self.architecture, self.differences = matching[0]

    def entries(self) -> dict[str, Entry]:
        """All tensors by our names. An unknown tensor keeps its name within the layer, and the
        weight loader reports it as unexpected."""
        found, transforms = dict[str, Entry](), self._transforms()

        def add(ours: str, tensor: GGUFTensor, shape: tuple[int, ...], *first: Transform) -> None:
            last = transforms.get(ours.split(".", 3)[-1])
            found[ours] = Entry(tensor, shape, (*first, *((last,) if last else ())))

        scales, ignored = self._scales()
        for name, tensor in self.tensors.items():
            if name in ROPE_FACTORS or name in ignored:
                continue
            ours, shape, stem = self._our_name(name), tensor.shape, name.split(".")[-2:][0]
            parts = ("gate", "up") if ours.count("{}") == 2 else ("",)
            is_stack = "{}" in ours and not {"{", "}"} & set(name)
            scale = scales.get(name, [])
            if is_stack and len(shape) == 3 and not shape[1] % len(parts):
                matrix = tensor._replace(shape=(shape[1] // len(parts), shape[2]))
                for n in range(shape[0] * len(parts)):
                    offset = tensor.offset + n * matrix.num_rows * matrix.row_bytes
                    expert = ours.format(n // len(parts), parts[n % len(parts)])
                    each = scale[n // len(parts) :][:1]
                    add(expert, matrix._replace(offset=offset), matrix.shape, *each)
                continue
            if stem in SPLIT_TENSORS and stem not in self.differences.names:
                groups, sizes = self._part_sizes(stem)
                if (expected := groups * sum(sizes)) != shape[0]:
                    raise WeightLoadError(
                        f"{tensor.file}: {quoted(name)} has {shape[0]} rows; the sizes in the"
                        f" file's metadata give {expected}"
                    )
                for part, indices in SPLIT_TENSORS[stem].items():
                    rows = groups * sum(sizes[n] for n in indices)
                    select = partial(_select_parts, groups=groups, sizes=sizes, indices=indices)
                    add(ours.replace(stem, part), tensor, (rows, *shape[1:]), select, *scale)
                continue
            if ours.endswith("shared_expert_gate.weight"):
                shape = (1, prod(shape))
            elif ours.endswith(("conv.conv.weight", "conv1d.weight")):
                shape = (shape[0], 1, prod(shape[1:]))
            elif ours.endswith((".A_log", ".D", ".mamba.norm.weight")):
                shape = (prod(shape),)
            elif ours.endswith((".k_b_proj.weight", ".v_b_proj.weight")):
                shape = (prod(shape[:-1]), shape[-1])
                tensor = tensor._replace(shape=shape)
            add(ours, tensor, shape, *scale)
        return found

    def _scales(self) -> tuple[dict[str, list[Transform]], set[str]]:
        """For NVFP4 tensors with scales, one per matrix: a transform per matrix. And the names of
        these scales, and of scales of activations, which have no effect on weights."""
        scales, ignored = dict[str, list[Transform]](), set[str]()
        for name, tensor in self.tensors.items():
            for stem in (name.removesuffix(".weight"), name) if tensor.type == "NVFP4" else ():
                ignored.add(f"{stem}.input_scale")
                scale, count = self.tensors.get(key := f"{stem}.scale"), prod(tensor.shape[:-2])
                # Why not own names: Gemma 4's router multiplies by the scales of its experts.
                is_free = name not in scales and key.split(".", 2)[-1] not in self.differences.names
                if scale and is_free and (scale.type, prod(scale.shape)) == ("F32", count):
                    values = read_rows(scale).view(count, 1)
                    scales[name] = [partial(_append, scale=value) for value in values]
                    ignored.add(key)
        return scales, ignored

    def _transforms(self) -> dict[str, Transform]:
        """Our name after the layer prefix -> the transform that is applied to rows when read."""
        metadata, found = self.metadata, dict[str, Transform]()
        if self.differences.interleaved:
            half_split = partial(deinterleave_rope, head_dim=metadata.head_dim)
            found |= {
                f"self_attn.{x}_proj.{end}": half_split for x in "qk" for end in ("weight", "bias")
            }
        found |= dict.fromkeys(("linear_attn.A_log", "mamba.A_log"), lambda rows: (-rows).log())
        key_heads = metadata.get("ssm.group_count", int)
        heads = metadata.get("ssm.time_step_rank", int)
        if self.differences.tiled and key_heads and heads:
            grouped = partial(group_heads, key_heads=key_heads, ratio=max(1, heads // key_heads))
            skipped = 2 * key_heads * metadata.get("ssm.state_size", int, 0)
            after_keys = partial(grouped, skipped=skipped)
            names = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")
            found |= {f"linear_attn.{name}": grouped for name in names}
            names = ("in_proj_qkv.weight", "conv1d.weight")
            found |= {f"linear_attn.{name}": after_keys for name in names}
            found["linear_attn.A_log"] = lambda rows: grouped(-rows).log()
        return found

    def _part_sizes(self, stem: str) -> tuple[int, tuple[int, ...]]:
        """For a tensor of `SPLIT_TENSORS`: the number of groups of its rows, and how many rows of a
        group belong to each part."""
        metadata = self.metadata
        if stem == "attn_qkv":
            heads = metadata.uniform("attention.head_count", int, 0)
            key_heads = metadata.uniform("attention.head_count_kv", int, heads)
            return 1, tuple(metadata.head_dim * count for count in (heads, key_heads, key_heads))
        groups = metadata.get("ssm.group_count", int) or 1
        heads, key, value = (
            metadata.get(f"ssm.{name}", int, 0)
            for name in ("time_step_rank", "state_size", "inner_size")
        )
        heads, value = heads // groups, value // groups
        return groups, (heads, heads) if stem == "ssm_ba" else (key, key, value, value)

    def _our_name(self, name: str) -> str:
        prefix, _, rest = name.partition(".")
        layer, _, part = rest.partition(".") if prefix == "blk" else ("", "", name)
        stem, _, end = part.rpartition(".")
        names = TENSOR_NAMES | self.differences.names
        ours = names.get(part) or f"{names.get(stem, stem)}.{end}"
        return f"model.layers.{layer}.{ours}" if layer else ours


def deinterleave_rope(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders rows of whole heads from the order for interleaved RoPE (pairs of neighbours) to the
    order for half-split RoPE."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def group_heads(rows: torch.Tensor, key_heads: int, ratio: int, skipped: int = 0) -> torch.Tensor:
    """Reorders value heads, of which there are `ratio` per key head. A file has the first value
    head of each key head, then the second of each; the result is grouped by key head. The first
    `skipped` rows are queries and keys, and keep their order."""
    values = rows[skipped:].unflatten(0, (ratio, key_heads, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((rows[:skipped], values))


def _append(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Appends the scale of a matrix to each of its rows; see `gguf_blocks.read_blocks`."""
    return torch.cat((rows, scale.view(torch.uint8).expand(len(rows), -1)), 1)


def _select_parts(
    rows: torch.Tensor, groups: int, sizes: tuple[int, ...], indices: tuple[int, ...]
) -> torch.Tensor:
    """Selects parts of the rows and concatenates them. Each of `groups` groups of rows consists of
    parts of these `sizes`."""
    parts = rows.unflatten(0, (groups, -1)).split(sizes, dim=1)
    return torch.cat([parts[n].flatten(0, 1) for n in indices])


def read_entries(
    path: Path, parts: Mapping[str, tuple[slice, ...]]
) -> Iterator[tuple[str, torch.Tensor | StoredRows]]:
    """See `read_tensors`. For a quantized tensor it yields StoredRows: whole rows, which are read
    when they are sliced."""
    entries = GGUFModel(path, keep=False).entries()  # A start reads the weights last.
    for name, part in parts.items():
        tensor, shape, transforms = entries[name]
        first, last, columns = 0, tensor.num_rows, part
        if part and shape == tensor.shape and len(shape) == 2:
            (first, last, _), columns = part[0].indices(shape[0]), (slice(None), *part[1:])
        if tensor.type not in FLOATS and not transforms:
            yield name, StoredRows(tensor, first, last)
            continue
        found = read_rows(tensor, first, last)
        is_whole = tensor.type in FLOATS and len(found) == tensor.num_rows
        found = found.view(tensor.shape) if is_whole else found
        for transform in transforms:
            found = transform(found)
        found = found.view(shape) if is_whole else found
        yield name, found[columns if tensor.type in FLOATS else columns[:1]]


def gguf_parts(path: Path) -> list[Path]:
    """The file, or all parts of its set."""
    return sorted({tensor.file for tensor in read_gguf(path).tensors.values()})
