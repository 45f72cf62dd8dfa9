"""LayerPlan, StatePlan and MoEConfig: what the layers of a family compute, as data.

`families/` makes them from a config's keys, `models/` builds layers from them. A mechanism is a
field here and a few lines there; a family is a choice of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import checked

Norms = Literal["pre", "post", "sandwich", "parallel", "parallel each"]
NormKind = Literal["rms", "wide", "centered", "bare", "layer", "centered layer", "bare layer"]
ANY_STEP = (0.0, math.inf)
SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
ATTENTION = "attention"
"""What transformers 4 wrote for FULL."""
QKNorm = Literal["per_head", "all_heads", "post_rope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPlan:
    """Sizes of multi-head latent attention (MLA): keys and values are made of one short vector per
    token. Fields are called as the keys of config.json.

    Attributes:
        kv_lora_rank: elements of that vector.
        q_lora_rank: of the one that queries are made of; None: of the hidden state itself.
        qk_nope_head_dim, qk_rope_head_dim: of each head's query and key, the dimensions without and
            with RoPE; the latter are the same in the keys of all heads.
        v_head_dim: of each head's value.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def size(self) -> int:
        """How many numbers of a token attention reads."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Multipliers:
    """The multipliers of Falcon-H1, whose layers have Mamba and attention in parallel, by the keys
    of config.json.

    Attributes:
        ssm_in_multiplier, attention_in_multiplier: on what goes into each.
        ssm_multipliers: on z, x, b, c and dt of Mamba.
        ssm_out_multiplier, attention_out_multiplier: on what comes out.
        mlp_multipliers: on the MLP's gate before its activation, and on what the MLP adds.
    """

    ssm_in_multiplier: float
    attention_in_multiplier: float
    ssm_multipliers: tuple[float, ...]
    ssm_out_multiplier: float
    attention_out_multiplier: float
    mlp_multipliers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Plan:
    """Gemma 4: layers of two shapes, of which the last may attend to the KV cache of earlier ones.

    Attributes:
        shapes: head dim and number of KV heads, of layers with a window and of the others.
        keys_are_values: in layers without a window, keys and values are one projection.
        num_shared: so many last layers attend to the keys and values of the last layer of their
            kind before them.
        shared_width: the width of their MLP, as a multiple of that of the other layers.
        input_size: width of the per-layer input embeddings; 0: there are none.
    """

    shapes: tuple[tuple[int, int], tuple[int, int]]
    keys_are_values: bool
    num_shared: int
    shared_width: int
    input_size: int

    @property
    def widest(self) -> tuple[int, int]:
        """The shape of the layers that keep the most."""
        return max(self.shapes, key=math.prod)

    def in_a_slice(self, window: int | None) -> int:
        """How many layers with this window share a slice of the KV cache."""
        return math.prod(self.widest) // math.prod(self.shapes[window is None])

    def slices(self, windows: Sequence[int | None]) -> list[tuple[int, ...]]:
        """The layers that keep keys and values, those together that share a slice."""
        own, found = windows[: len(windows) - self.num_shared], []
        for window in dict.fromkeys(own):
            alike = [n for n, other in enumerate(own) if other == window]
            size = self.in_a_slice(window)
            found += [tuple(alike[n : n + size]) for n in range(0, len(alike), size)]
        return sorted(found)


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One decoder layer, the embeddings and the head; by default Llama's. Fields are called as keys
    of config.json where there is one that says the same.

    Norms:
        norms: "pre": before attention and MLP; "post": after them; "sandwich": both; "parallel":
            attention and MLP have the same input, and share one pre-norm; "parallel each": they
            have the same input, and a pre-norm each.
        norm: "rms"; "wide": its weight is multiplied before rounding to the model's dtype;
            "centered": wide, and the factor is 1 + weight; "layer": LayerNorm; "centered layer":
            that with the factor 1 + weight; "bare", "bare layer": RMSNorm and LayerNorm that have
            no weight.
        norm_bias: LayerNorm adds a bias.
        qk_norm: the norm of queries and keys: of each head, before RoPE ("per_head") or after it
            ("post_rope"), or of "all_heads" as one; None: there is none.

    Attention:
        qkv_bias, output_bias: which projections have biases.
        output_gate: attention's output is multiplied by a sigmoid of this: in the checkpoint, rows
            of "q_proj", or a "gate_proj" of its own; "per_head": the latter with one number per
            head.
        attention_multiplier: factor on q.k; None: head_dim ** -0.5.
        attn_logit_softcapping: c of c * tanh(x / c), on scores; None: none.
        attention_sinks: each head has a learned score in the sum of its softmax
            (`AttentionSpec.sinks`).
        latent: multi-head latent attention (MLA); None: keys and values are made of the hidden
            state.

    Positions:
        rotary_dim: RoPE is applied to the first so many dimensions of a head; None: to all.
        rope_interleaved: RoPE rotates pairs of neighbours, not of the two halves of a head.
        learned_positions: a learned vector per position is added to the embeddings, and their table
            has so many rows before that of position 0; None: there is none.

    MLP:
        gated_mlp: the MLP is down(act(gate(x)) * up(x)); else down(act(up(x))).
        hidden_act: a key of `layers.kernels.GATES`, of an MLP without a gate one of
            `models.generic.ACTIVATIONS`; that of experts too.
        mlp_bias: its projections have biases.

    Embeddings, residuals, head:
        embedding_multiplier, residual_multiplier, logit_scale: factors on embeddings, on what
            attention and MLP add, and on logits.
        final_logit_softcapping: as that of scores, on logits.
        lm_head_bias: logits have biases.

    Checkpoint:
        fused_qkv: q, k and v are one tensor of the checkpoint, in which all queries, all keys and
            all values follow each other ("parts"), or the queries, key and value of each KV head
            ("heads").
        fused_gate_up: gate and up are one tensor.

    Of one family each:
        clip_qkv: OLMo: queries, keys and values are clipped to this absolute value, before norms
            and RoPE.
        rope_reversed: NanoChat: RoPE rotates in the other direction.
        embedding_norm: NanoChat: the last norm norms the embeddings as well.
        transposed_matrices: GPT-2: the matrices of layers are [inputs, outputs] in the checkpoint.
        gemma4: layers differ in their shapes; None: all are alike.
        falcon_h1: every layer has Mamba and attention in parallel, with these factors; None: none
            has.
        layers_block_type: Nemotron-H: each layer is only one block after one norm, named as in the
            config; None: each has a mixer and an MLP.
    """

    norms: Norms = "pre"
    norm: NormKind = "rms"
    norm_bias: bool = False
    qk_norm: QKNorm | None = None

    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: Literal[False, "q_proj", "gate_proj", "per_head"] = False
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    attention_sinks: bool = False
    latent: LatentPlan | None = None

    rotary_dim: int | None = None
    rope_interleaved: bool = False
    learned_positions: int | None = None

    gated_mlp: bool = True
    hidden_act: str = "silu"
    mlp_bias: bool = False

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    lm_head_bias: bool = False

    fused_qkv: Literal[False, "parts", "heads"] = False
    fused_gate_up: bool = False

    clip_qkv: float | None = None
    rope_reversed: bool = False
    embedding_norm: bool = False
    transposed_matrices: bool = False
    gemma4: Gemma4Plan | None = None
    falcon_h1: FalconH1Multipliers | None = None
    layers_block_type: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Layers that keep a state of fixed size a sequence in place of keys and values.

    Attributes:
        kind: "delta": a matrix per value head, by the gated delta rule, after a short convolution;
            "conv": the convolution alone, between two gates; "mamba": a matrix per head, by
            Mamba-2's rule, after a convolution. Its value heads are Mamba's heads, its key heads
            the groups, `key_dim` is the size of b and c.
        layers: which ones.
        kernel: how many tokens the convolution sees.
        channels: how wide it is.
        num_key_heads, num_value_heads, key_dim, value_dim: of the delta rule's heads; a key head
            serves as many neighbouring value heads as there are more of these.
        merged: the checkpoint holds queries, keys, values and gates as one tensor, key head by key
            head.
        tiled: the inputs of the last projection are value heads in another order: first the first
            of each key head, then the second.
        bias: the projections and the convolution of "conv" have biases, the first projection of
            "mamba".
        conv_bias, output_bias: the convolution and the last projection of "mamba" have.
        norm: of "mamba": after the gate ("behind"), or "before" it; None: there is none.
        step_limits: between which the dt of "mamba" stays.
    """

    kind: Literal["delta", "conv", "mamba"]
    layers: tuple[int, ...]
    kernel: int
    channels: int
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    merged: bool = False
    tiled: bool = False
    bias: bool = False
    conv_bias: bool = False
    output_bias: bool = False
    norm: Literal["behind", "before"] | None = None
    step_limits: tuple[float, float] = ANY_STEP

    @property
    def size(self) -> int:
        """How many numbers one layer keeps of a sequence."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return matrices + (self.kernel - 1) * self.channels


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: in `layers` the MLP is `num_experts` small ones, of which a token takes
    `num_experts_per_tok`.

    Attributes:
        intermediate_size: of each expert.
        score: what router logits become; sums of "softmax" are 1 over all experts. "sparsemixer"
            takes one expert, then another, each with its share of a softmax over those that come
            near it, as `jitter` says.
        norm_topk_prob: the weights of a token's experts are divided by their sum, which is
            `norm_least` at least, plus `norm_epsilon`.
        correction_bias: the checkpoint has a bias that is added where experts are chosen, and not
            to their weights; "row": as a matrix of one row.
        num_groups, groups_per_token: experts are chosen from the best groups only.
        best_of_group: by the sum of how many of its best experts groups are compared.
        scaling_factor: on the weights.
        shared_size: inner size of the MLP that every token takes besides; 0: none.
        shared_gate: a learned sigmoid weighs it.
        router_bias, expert_bias: the router, and both matrices of each expert, have biases.
        interleaved: the checkpoint's stacked rows of gate and of up alternate.
        gated: experts are gated MLPs; else as `LayerPlan.gated_mlp` says.
        inputs_first: its stacked matrices are [E, inputs, outputs]; in MXFP4 as those of others.
        layers: which layers have experts.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    layers: tuple[int, ...]
    norm_topk_prob: bool = True
    norm_epsilon: float = 0.0
    norm_least: float = 0.0
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.0
    correction_bias: bool | Literal["row"] = False
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    scaling_factor: float = 1.0
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False
    inputs_first: bool = False
    gated: bool = True
