"""GGUFModel: a GGUF file's tensors under our names, and the changes to their rows when they are
read.

If a file stores the rows of queries and keys in another order, reading restores the original order,
so models and kernels are the same as for the original checkpoint. Called by `files.py` and
`gguf_models.py`; knows neither layers nor how quantized blocks are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from nanoengine.checkpoint.families import every_family
from nanoengine.checkpoint.gguf import FLOATS, GGUFTensor, StoredRows, read_gguf, read_rows
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from nanoengine.settings.checks import join_names, repr_short

ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are read with the config."""

# fmt: off
MATRICES = ("gate", "up", "down")
NAMES = {
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
}
"""A tensor's name, without the layer and mostly without ".weight" -> our name. {} is the index of
an expert in a stack; with two {}, the stack holds both gate and up rows."""
SPLIT: dict[str, dict[str, tuple[int, ...]]] = {
    "attn_qkv": {"self_attn.q_proj": (0,), "self_attn.k_proj": (1,), "self_attn.v_proj": (2,)},
    "ssm_in": {"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)},
    "ssm_ba": {"linear_attn.in_proj_b": (0,), "linear_attn.in_proj_a": (1,)},
}
"""A tensor that contains several of ours, unless its architecture names it -> the parts of its rows
for each: see `GGUFModel._sizes`."""
# fmt: on

Change = Callable[[torch.Tensor], torch.Tensor]


class Entry(NamedTuple):
    """One of our tensors in a file.

    Attributes:
        tensor: its location; in a stack of experts, one expert's matrix.
        shape: as layers have it.
        changes: functions that are applied in order to its rows when they are read.
    """

    tensor: GGUFTensor
    shape: tuple[int, ...]
    changes: tuple[Change, ...] = ()


class GGUFModel:
    """One file, or set of files, of a known architecture.

    Attributes:
        name: its family, by the architecture of a config.json.
        files: the differences of this family's GGUF files.

    Raises:
        UnsupportedModelError: the architecture is unknown, or the file is not a language model.
        WeightLoadError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.tensors, metadata = read_gguf(path)[::-1]
        self.given = given = Metadata(path, metadata, self.tensors)
        kind, every = given.read("general.type", str, "model"), every_family()
        known = sorted({name for family in every.values() for name in family.gguf})
        if kind != "model" or given.architecture not in known:
            what = {"architecture": given.architecture} if kind == "model" else {"type": kind}
            ((key, value),) = what.items()
            raise UnsupportedModelError(
                f"{path} has general.{key}={repr_short(value)}; supported are language models of"
                f" {join_names(known, like=given.architecture)}"
            )
        own = given.architecture
        found = [(name, family.gguf[own]) for name, family in every.items() if own in family.gguf]
        asked = [one for one in found if one[1].when is not None and one[1].when(given)]
        self.name, self.files = (asked or [one for one in found if one[1].when is None])[0]

    def entries(self) -> dict[str, Entry]:
        """All tensors by our names. An unknown tensor keeps its name within the layer, and is
        reported as unexpected."""
        found, changes = dict[str, Entry](), self._changes()

        def put(ours: str, tensor: GGUFTensor, shape: tuple[int, ...], *first: Change) -> None:
            then = changes.get(ours.split(".", 3)[-1])
            found[ours] = Entry(tensor, shape, (*first, *((then,) if then else ())))

        for name, tensor in self.tensors.items():
            if name in ROTATIONS:
                continue
            ours, shape, stem = self._our_name(name), tensor.shape, name.split(".")[-2:][0]
            parts = ("gate", "up") if ours.count("{}") == 2 else ("",)
            stacked = "{}" in ours and not {"{", "}"} & set(name)
            if stacked and len(shape) == 3 and not shape[1] % len(parts):
                one = tensor._replace(shape=(shape[1] // len(parts), shape[2]))
                for n in range(shape[0] * len(parts)):
                    place = tensor.offset + n * one.num_rows * one.row_bytes
                    each = ours.format(n // len(parts), parts[n % len(parts)])
                    put(each, one._replace(offset=place), one.shape)
                continue
            if stem in SPLIT and stem not in self.files.names:
                groups, sizes = self._sizes(stem)
                if (expected := groups * sum(sizes)) != shape[0]:
                    raise WeightLoadError(
                        f"{tensor.file}: {repr_short(name)} has {shape[0]} rows; by the sizes"
                        f" that the file names it has {expected}"
                    )
                for part, wanted in SPLIT[stem].items():
                    rows = groups * sum(sizes[n] for n in wanted)
                    own = partial(_parts, groups=groups, sizes=sizes, wanted=wanted)
                    put(ours.replace(stem, part), tensor, (rows, *shape[1:]), own)
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
            put(ours, tensor, shape)
        return found

    def _changes(self) -> dict[str, Change]:
        """Our name after the layer prefix -> the change to rows when they are read."""
        given, found = self.given, dict[str, Change]()
        if self.files.pairs:
            unpaired = partial(_unpaired, head_dim=given.head_dim)
            found |= {
                f"self_attn.{x}_proj.{end}": unpaired for x in "qk" for end in ("weight", "bias")
            }
        found |= dict.fromkeys(("linear_attn.A_log", "mamba.A_log"), lambda rows: (-rows).log())
        key_heads, heads = (given.get(f"ssm.{n}", int) for n in ("group_count", "time_step_rank"))
        if self.files.tiled and key_heads and heads:
            grouped = partial(_grouped, key_heads=key_heads, each=max(1, heads // key_heads))
            skipping = partial(grouped, skipped=2 * key_heads * given.get("ssm.state_size", int, 0))
            names = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")
            found |= {f"linear_attn.{name}": grouped for name in names}
            skipped = ("in_proj_qkv.weight", "conv1d.weight")
            found |= {f"linear_attn.{name}": skipping for name in skipped}
            found["linear_attn.A_log"] = lambda rows: grouped(-rows).log()
        return found

    def _sizes(self, stem: str) -> tuple[int, tuple[int, ...]]:
        """The number of groups in the rows of a tensor of `SPLIT`, and the rows per group of each
        part."""
        given = self.given
        if stem == "attn_qkv":
            heads = given.one("attention.head_count", int, 0)
            key_heads = given.one("attention.head_count_kv", int, heads)
            return 1, tuple(given.head_dim * count for count in (heads, key_heads, key_heads))
        groups = given.get("ssm.group_count", int) or 1
        each, key, value = (
            given.get(f"ssm.{name}", int, 0)
            for name in ("time_step_rank", "state_size", "inner_size")
        )
        each, value = each // groups, value // groups
        return groups, (each, each) if stem == "ssm_ba" else (key, key, value, value)

    def _our_name(self, name: str) -> str:
        begin, _, rest = name.partition(".")
        layer, _, part = rest.partition(".") if begin == "blk" else ("", "", name)
        stem, _, end = part.rpartition(".")
        names = NAMES | self.files.names
        ours = names.get(part) or f"{names.get(stem, stem)}.{end}"
        return f"model.layers.{layer}.{ours}" if layer else ours


def _unpaired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders rows of whole heads from interleaved RoPE (pairs of neighbours) to the half-split
    form."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _grouped(rows: torch.Tensor, key_heads: int, each: int, skipped: int = 0) -> torch.Tensor:
    """Reorders value heads. A file first has the first value head of each key head, then the
    second; the result is grouped by key head. The first `skipped` rows belong to other heads and
    stay."""
    values = rows[skipped:].unflatten(0, (each, key_heads, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((rows[:skipped], values))


def _parts(
    rows: torch.Tensor, groups: int, sizes: tuple[int, ...], wanted: tuple[int, ...]
) -> torch.Tensor:
    """Selects the wanted parts from rows in `groups` groups, which consist of parts of these
    `sizes`; the parts are concatenated."""
    parts = rows.unflatten(0, (groups, -1)).split(sizes, dim=1)
    return torch.cat([parts[n].flatten(0, 1) for n in wanted])


def read_entries(
    path: Path, parts: Mapping[str, tuple[slice, ...]]
) -> Iterator[tuple[str, torch.Tensor | StoredRows]]:
    """See `read_tensors`. Rows of a quantized tensor are returned whole, as bytes that are read
    later."""
    here = GGUFModel(path).entries()
    for name, part in parts.items():
        tensor, shape, changes = here[name]
        first, last, columns = 0, tensor.num_rows, part
        if part and shape == tensor.shape and len(shape) == 2:
            (first, last, _), columns = part[0].indices(shape[0]), (slice(None), *part[1:])
        if tensor.type not in FLOATS and not changes:
            yield name, StoredRows(tensor, first, last)
            continue
        found = read_rows(tensor, first, last)
        whole = tensor.type in FLOATS and len(found) == tensor.num_rows
        found = found.view(tensor.shape) if whole else found
        for change in changes:
            found = change(found)
        found = found.view(shape) if whole else found
        yield name, found[columns] if tensor.type in FLOATS else found


def files_of(path: Path) -> list[Path]:
    """The file, or all parts of its set."""
    return sorted({tensor.file for tensor in read_gguf(path).tensors.values()})
