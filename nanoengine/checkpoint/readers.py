"""Readers: what a family's layers are, read from its config's keys; rows of `families.py` choose.

Five kinds: a plan of the layers, which of them keep a state, which have a window, how each turns
its heads, and the mixture of experts. A reader obeys each key that it reads. Plans and experts are
fields of `LayerPlan` and `MoEConfig`, given by name: a value, or what reads one, such as
`key("mlp_bias")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nanoengine.checkpoint.keys import KEYS, Keys
from nanoengine.checkpoint.plan import LatentPlan, LayerPlan, MoEConfig, StatePlan
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV = "linear_attention", "conv"
MAMBA, ATTENTION = "mamba", "attention"
"""What transformers 4 wrote for LINEAR and FULL."""

T = TypeVar("T")
Reader = Callable[[Keys], T]


def key(name: str, make: Callable[[Any], Any] | None = None) -> Reader[Any]:
    """Reads a key; `make` turns its value into the field's."""
    return lambda keys: make(keys.get(name)) if make else keys.get(name)


def size(*names: str) -> Reader[int]:
    """Reads the first of these keys that is there, which the model can't do without."""

    def read(keys: Keys) -> int:
        for name in names:
            if name in keys:
                return keys.require(name)
        raise UnsupportedModelError(
            f"config.json needs {' or '.join(names)}, from 1 to {KEYS[names[0]].most:,}"
        )

    return read


def _made(kind: Callable[..., T], fields: Mapping[str, Any], keys: Keys) -> T:
    return kind(**{n: value(keys) if callable(value) else value for n, value in fields.items()})


# --- plans ----------------------------------------------------------------------------------------


def plan(only: Mapping[str, tuple[Any, ...]] | None = None, **fields: Any) -> Reader[LayerPlan]:
    """A plan of these fields; `only`: keys -> the values that are implemented."""

    def read(keys: Keys) -> LayerPlan:
        for name, values in (only or {}).items():
            keys.allow(name, *values)
        return _made(LayerPlan, fields, keys)

    return read


def latent(keys: Keys, value_dim: int | None = None) -> LatentPlan:
    """DeepSeek-V2's sizes of attention."""
    rope_dim = keys.require("qk_rope_head_dim")
    if rope_dim % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim={rope_dim} must be even")
    return LatentPlan(
        rank=keys.require("kv_lora_rank"),
        query_rank=keys.get("q_lora_rank"),
        nope_dim=keys.require("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=value_dim or keys.require("v_head_dim"),
    )


def minicpm_latent(keys: Keys) -> LatentPlan:
    """The same where values may have the size that plain heads would have."""
    plain = keys.require("hidden_size") // keys.require("num_attention_heads")
    return latent(keys, keys.get("v_head_dim") or plain)


def depth_scale(keys: Keys) -> float:
    """MiniCPM's factor on what a layer adds."""
    layers: int = keys.require("num_hidden_layers")
    depth: float | None = keys.get("scale_depth")
    return 1.0 if depth is None else depth / layers**0.5


def width_scale(keys: Keys) -> float:
    """MiniCPM's factor on logits."""
    return keys.require("dim_model_base") / keys.require("hidden_size")


# --- the MLP's inner size -------------------------------------------------------------------------


def lfm2_inner_size(keys: Keys) -> int:
    """Two thirds of what the config names, rounded up, unless it says that this is the size."""
    found = size("block_ff_dim", "intermediate_size")(keys)
    if keys.get("block_auto_adjust_ff_dim"):
        found = int(keys.get("block_ffn_dim_multiplier") * int(2 * found / 3))
        multiple = keys.get("block_multiple_of")
        found = multiple * -(-found // multiple)
    return found


# --- which layers keep a state --------------------------------------------------------------------


def delta_states(*, merged: bool) -> Reader[StatePlan]:
    """Qwen3-Next: every layer but each `full_attention_interval`-th."""

    def states(keys: Keys) -> StatePlan:
        key_heads, key_dim = keys.get("linear_num_key_heads"), keys.get("linear_key_head_dim")
        heads, value_dim = keys.get("linear_num_value_heads"), keys.get("linear_value_head_dim")
        if heads % key_heads:
            raise UnsupportedModelError(
                f"linear_num_value_heads={heads} must be a multiple of"
                f" linear_num_key_heads={key_heads}"
            )
        every = keys.get("full_attention_interval")
        kinds = keys.get("layer_types") or [
            FULL if (n + 1) % every == 0 else LINEAR
            for n in range(keys.require("num_hidden_layers"))
        ]
        return StatePlan(
            kind="delta",
            layers=those(kinds, LINEAR),
            kernel=keys.get("linear_conv_kernel_dim"),
            channels=2 * key_heads * key_dim + heads * value_dim,
            num_key_heads=key_heads,
            num_value_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            merged=merged,
        )

    return states


def conv_states(keys: Keys) -> StatePlan:
    """LFM2: as `layer_types` says, else all but `full_attn_idxs`."""
    every, full = range(keys.require("num_hidden_layers")), keys.get("full_attn_idxs")
    kinds = keys.get("layer_types") or [FULL if full is None or n in full else CONV for n in every]
    return StatePlan(
        kind="conv",
        layers=those(kinds, CONV),
        kernel=keys.get("conv_L_cache"),
        channels=keys.require("hidden_size"),
        bias=keys.get("conv_bias"),
    )


def those(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(n for n, given in enumerate(kinds) if given == kind)


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""

WindowsReader = Callable[[Keys, Kinds, int], list[bool]]
"""The third argument is the number of layers."""


def never(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return [False] * layers


def windows(
    pattern: Callable[[Keys, int], list[bool]], *, asked: bool = False, named: bool = True
) -> WindowsReader:
    """None slide if `sliding_window` is null, else as `layer_types` says, else by a pattern.

    Args:
        asked: none do unless `use_sliding_window` says so either.
        named: the family has `layer_types`.
    """

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
        wanted = not asked or keys.get("use_sliding_window")
        if keys.get("sliding_window") is None or not wanted:
            return [False] * layers
        return _named(kinds) if named and kinds else pattern(keys, layers)

    return slides


def every_layer(keys: Keys, layers: int) -> list[bool]:
    return [True] * layers


def from_max_window_layers(keys: Keys, layers: int) -> list[bool]:
    return [n >= keys.get("max_window_layers") for n in range(layers)]


def no_layer(keys: Keys, layers: int) -> list[bool]:
    return [False] * layers


def alternate(keys: Keys, layers: int) -> list[bool]:
    return [n % 2 == 0 and n < keys.get("max_window_layers") for n in range(layers)]


def not_turned(keys: Keys, layers: int) -> list[bool]:
    return [not turned for turned in smollm_turned(keys, never(keys, None, layers))]


def all_but_every(number: int | str = "sliding_window_pattern") -> WindowsReader:
    """As `layer_types` says, else every layer but each n-th, n being this number, or this key.
    A model that has such layers needs a window."""

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
        if kinds is not None:
            return _named(kinds)
        every = keys.get(number) if isinstance(number, str) else number
        if isinstance(every, str):
            return [every[n % len(every)] == "L" and n + 1 < layers for n in range(layers)]
        if not 1 <= every <= 10_000:
            raise UnsupportedModelError(
                f"config.json: {number} must be from 1 to 10,000, got {every}"
            )
        return [(n + 1) % every != 0 for n in range(layers)]

    return slides


def all_but_first_of_four(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return [n % 4 > 0 for n in range(layers)] if kinds is None else _named(kinds)


def _named(kinds: Sequence[str]) -> list[bool]:
    return [kind == SLIDING for kind in kinds]


# --- which layers turn their heads ----------------------------------------------------------------

TurnedReader = Callable[[Keys, Sequence[bool]], Sequence[int]]
"""The second argument says which layers have a window; a 0 in the answer is not turned."""


def always(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    return [True] * len(slides)


def only_with_window(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    return slides


def exaone_turned(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    """In a model with windows, layers that see everything are not turned."""
    return slides if keys.get("sliding_window") is not None else always(keys, slides)


def nowhere(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    return [False] * len(slides)


def if_named_rope(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    """Granite 4: none unless `position_embedding_type` is "rope"."""
    return [keys.get("position_embedding_type") == "rope"] * len(slides)


def smollm_turned(keys: Keys, slides: Sequence[bool]) -> Sequence[int]:
    """`no_rope_layers` has a 0 for each layer that is not turned."""
    every, given = keys.get("no_rope_layer_interval"), keys.get("no_rope_layers")
    layers = len(slides)
    turned = given or [int((n + 1) % every != 0) for n in range(layers)]
    if len(turned) < layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(turned)} entries, num_hidden_layers={layers}"
        )
    return turned[:layers]


# --- mixtures of experts --------------------------------------------------------------------------


def experts(
    *,
    count: str = "num_experts",
    taken: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    score: str = "softmax",
    **fields: Any,
) -> Reader[MoEConfig]:
    """A mixture of experts, by the keys that say how many there are, how many of them a token takes
    and of which inner size they are."""

    def read(keys: Keys) -> MoEConfig:
        if score == "sigmoid":
            keys.allow("scoring_func", score)
        usual = {
            # Why a second: some writers of Qwen3-MoE call them so.
            "num_experts": size(count, "num_local_experts"),
            "num_experts_per_tok": size(taken, "num_experts_per_tok"),
            "intermediate_size": size(inner),
            "layers": tuple(range(keys.require("num_hidden_layers"))),
        }
        moe = _made(MoEConfig, {**usual, "score": score, **fields}, keys)
        if moe.num_experts_per_tok > moe.num_experts:
            raise UnsupportedModelError(
                f"{taken}={moe.num_experts_per_tok} must be at most {count}={moe.num_experts}"
            )
        if moe.score == "sparsemixer" and moe.num_experts_per_tok != 2:
            raise UnsupportedModelError(
                f"{taken}={moe.num_experts_per_tok} is not implemented; supported: 2"
            )
        groups, kept = moe.num_groups, moe.groups_per_token
        small = groups > 1 and moe.num_experts < moe.best_of_group * groups
        if not 1 <= kept <= groups or moe.num_experts % groups or small:
            raise UnsupportedModelError(
                f"n_group={groups} and topk_group={kept} must make equal groups of two and more of"
                f" {count}={moe.num_experts}"
            )
        return moe

    return read


def where_any(some: Reader[Any], made: Reader[MoEConfig]) -> Reader[MoEConfig | None]:
    """A mixture of experts where there are `some`."""
    return lambda keys: made(keys) if some(keys) else None


def limited(name: str) -> Reader[int]:
    """DeepSeek-V2: what this key says, in the large one; the others have no groups of experts."""
    return lambda keys: (
        keys.require(name) if keys.get("topk_method") == "group_limited_greedy" else 1
    )


def sparse_layers(keys: Keys) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, `mlp_only_layers` never."""
    step, dense = keys.get("decoder_sparse_step"), keys.get("mlp_only_layers") or ()
    layers = range(keys.require("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def layers_from(name: str) -> Reader[tuple[int, ...]]:
    """The first layers, as many as this key says, are dense."""
    return lambda keys: tuple(range(keys.get(name), keys.require("num_hidden_layers")))


def named_sparse_layers(keys: Keys) -> tuple[int, ...]:
    """As `mlp_layer_types` says, else as `layers_from`."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("mlp_layer_types")
    if not kinds:
        return layers_from("first_k_dense_replace")(keys)
    keys.get("first_k_dense_replace")  # the older name of the same
    if len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"mlp_layer_types={shown(kinds)} must be 'dense' or 'sparse' for each of"
            f" num_hidden_layers={layers}"
        )
    return those(kinds, "sparse")


def shared_size(name: str = "n_shared_experts") -> Reader[int]:
    """DeepSeek-V3: as many shared experts of an expert's size as this key says."""

    def read(keys: Keys) -> int:
        count = keys.get(name)
        count = keys.require(name) if count is None else count
        return count * keys.require("moe_intermediate_size")

    return read
