"""LayerConfig, LinearAttentionConfig and MoEConfig: what the layers of a family compute, as data.

`families/` makes them from a config's keys, `models/` builds layers from them. A mechanism is one
field here and a few lines in `models/`; a family is a choice of values.
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
"""The name of FULL in transformers 4."""
QKNorm = Literal["per_head", "all_heads", "post_rope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of multi-head latent attention (MLA): keys and values are made from one short vector
    per token. Fields have the names of config.json's keys.

    Attributes:
        kv_lora_rank: elements of that vector.
        q_lora_rank: elements of the vector that queries are made from; None: queries are made from
            the hidden state itself.
        qk_nope_head_dim, qk_rope_head_dim: dimensions of each head's query and key without and with
            RoPE; all heads share the key's dimensions with RoPE.
        v_head_dim: dimensions of each head's value.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def size(self) -> int:
        """Cached elements per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Multipliers:
    """The multipliers of Falcon-H1, whose layers have Mamba and attention in parallel. Fields have
    the names of config.json's keys.

    Attributes:
        ssm_in_multiplier, attention_in_multiplier: on the inputs of each.
        ssm_multipliers: on z, x, b, c and dt of Mamba.
        ssm_out_multiplier, attention_out_multiplier: on the outputs.
        mlp_multipliers: on the MLP's gate before its activation, and on the MLP's output.
    """

    ssm_in_multiplier: float
    attention_in_multiplier: float
    ssm_multipliers: tuple[float, ...]
    ssm_out_multiplier: float
    attention_out_multiplier: float
    mlp_multipliers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Plan:
    """Gemma 4: layers of two shapes; the last ones may attend to the KV cache of earlier ones.

    Attributes:
        shapes: head dim and number of KV heads, of layers with a window and of the others.
        keys_are_values: in layers without a window, keys and values are one projection.
        num_shared: number of last layers that use the keys and values of the last earlier layer of
            their kind.
        shared_width: the width of their MLP, as a multiple of the other layers' width.
        input_size: width of the per-layer input embeddings; 0: there are none.
    """

    shapes: tuple[tuple[int, int], tuple[int, int]]
    keys_are_values: bool
    num_shared: int
    shared_width: int
    input_size: int

    @property
    def widest(self) -> tuple[int, int]:
        """The shape of the layers with the largest KV cache."""
        return max(self.shapes, key=math.prod)

    def layers_per_slice(self, window: int | None) -> int:
        """How many layers with this window share a slice of the KV cache."""
        return math.prod(self.widest) // math.prod(self.shapes[window is None])

    def slices(self, windows: Sequence[int | None]) -> list[tuple[int, ...]]:
        """The layers with a KV cache, grouped by the slice that they share."""
        own, found = windows[: len(windows) - self.num_shared], []
        for window in dict.fromkeys(own):
            alike = [n for n, other in enumerate(own) if other == window]
            size = self.layers_per_slice(window)
            found += [tuple(alike[n : n + size]) for n in range(0, len(alike), size)]
        return sorted(found)


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer, the embeddings and the head; the defaults are Llama's. Fields have the
    names of config.json's keys where one has the same meaning.

    Norms:
        norms: "pre": before attention and MLP; "post": after them; "sandwich": both; "parallel":
            attention and MLP have the same input, and share one pre-norm; "parallel each": they
            have the same input, and a pre-norm each.
        norm: "rms"; "wide": its weight is multiplied before rounding to the model's dtype;
            "centered": wide, with the factor 1 + weight; "layer": LayerNorm; "centered layer":
            LayerNorm with the factor 1 + weight; "bare", "bare layer": RMSNorm and LayerNorm
            without a weight.
        norm_bias: LayerNorm adds a bias.
        qk_norm: the norm of queries and keys: per head, before RoPE ("per_head") or after it
            ("post_rope"), or over "all_heads" together; None: there is none.
    Attention:
        qkv_bias, output_bias: the projections have biases.
        output_gate: attention's output is multiplied by a sigmoid of this: in the checkpoint, rows
            of "q_proj", or a separate "gate_proj"; "per_head": a gate_proj with one number per
            head.
        attention_multiplier: factor on q.k; None: head_dim ** -0.5.
        attn_logit_softcapping: c: scores become c * tanh(x / c); None: no soft cap.
        attention_sinks: each head has a learned score in the sum of its softmax
            (`AttentionSpec.sinks`).
        latent: multi-head latent attention (MLA); None: ordinary keys and values.
    Positions:
        rotary_dim: RoPE is applied only to this many first dimensions of a head; None: to all.
        rope_interleaved: RoPE rotates pairs of neighbours, not pairs from the two halves of a head.
        learned_positions: a learned vector per position is added to the embeddings; their table has
            this many rows before position 0. None: there is none.
    MLP:
        gated_mlp: the MLP is down(act(gate(x)) * up(x)); else down(act(up(x))).
        hidden_act: a key of `layers.kernels.GATES`, or of `models.generic.ACTIVATIONS` for an MLP
            without a gate; also for experts.
        mlp_bias: its projections have biases.
    Embeddings, residuals, head:
        embedding_multiplier, residual_multiplier, logit_scale: factors on embeddings, on what
            attention and MLP add, and on logits.
        final_logit_softcapping: as attn_logit_softcapping, on logits.
        lm_head_bias: logits have biases.
    Checkpoint:
        fused_qkv: q, k and v are one tensor of the checkpoint, with all queries, then all keys,
            then all values ("parts"), or with the queries, key and value of each KV head ("heads").
        fused_gate_up: gate and up are one tensor.
    For a single family each:
        clip_qkv: OLMo: queries, keys and values are clipped to this absolute value, before norms
            and RoPE.
        rope_reversed: NanoChat: RoPE rotates in the other direction.
        embedding_norm: NanoChat: the last norm is also applied to the embeddings.
        transposed_matrices: GPT-2: the matrices of layers are [inputs, outputs] in the checkpoint.
        gemma4: layers have two shapes; None: all have the same.
        falcon_h1: every layer has Mamba and attention in parallel, with these multipliers; None: no
            layer has.
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
    latent: MLAConfig | None = None

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
class LinearAttentionConfig:
    """Recurrent layers: they keep a state of fixed size per sequence instead of keys and values.

    Attributes:
        kind: "delta": a matrix per value head, by the gated delta rule, after a short convolution;
            "conv": the convolution alone, between two gates; "mamba": a matrix per head, by
            Mamba-2's rule, after a convolution. For "mamba" the value heads are Mamba's heads, the
            key heads are its groups, and `key_dim` is the size of b and c.
        layers: indices of the recurrent layers.
        kernel: tokens that the convolution sees.
        channels: width of the convolution.
        num_key_heads, num_value_heads, key_dim, value_dim: of the rule's heads; each key head
            serves num_value_heads / num_key_heads adjacent value heads.
        merged: the checkpoint stores queries, keys, values and gates as one tensor, key head by key
            head.
        tiled: the inputs of the last projection have the value heads in another order: the first
            value head of each key head, then the second.
        bias: the projections and the convolution of "conv" have biases, or the first projection of
            "mamba".
        conv_bias, output_bias: the convolution and the last projection of "mamba" have biases.
        norm: of "mamba": after the gate ("behind"), or "before" it; None: there is none.
        step_limits: the range of dt of "mamba".
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
        """Elements of one layer's state per sequence."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return matrices + (self.kernel - 1) * self.channels


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: in `layers` the MLP is replaced by `num_experts` small ones; each token
    uses `num_experts_per_tok`.

    Attributes:
        intermediate_size: of each expert.
        score: the function of router logits; "softmax" is normalized over all experts.
            "sparsemixer" selects one expert, then another; the weight of each is its share of a
            softmax over the experts with similar scores, as `jitter` defines.
        norm_topk_prob: the weights of a token's experts are divided by their sum, which is clamped
            to at least `norm_least`, plus `norm_epsilon`.
        correction_bias: the checkpoint has a bias that affects only the selection of experts, not
            their weights; "row": stored as a matrix of one row.
        num_groups, groups_per_token: experts are selected only from the best groups.
        best_of_group: groups are ranked by the sum of this many of their best experts.
        scaling_factor: on the weights.
        shared_size: inner size of the MLP shared by all tokens; 0: none.
        shared_gate: the shared MLP is multiplied by a learned sigmoid.
        router_bias, expert_bias: the router, and both matrices of each expert, have biases.
        interleaved: gate and up rows alternate in the checkpoint's stacks.
        gated: experts are gated MLPs; else as `LayerConfig.gated_mlp`.
        inputs_first: the stacked matrices are [E, inputs, outputs]; in MXFP4 they have the usual
            order.
        layers: the layers with experts.
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
