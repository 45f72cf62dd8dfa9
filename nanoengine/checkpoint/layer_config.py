"""LayerConfig, LinearAttentionConfig and MoEConfig: what the layers of a family compute, as data.

`families/` creates them from the keys of a config.json, and `models/` builds layers from them. Each
mechanism is one field here and a few lines in `models/`; a family selects the values of the fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import checked

Norms = Literal["pre", "post", "sandwich"]
NormKind = Literal["rms", "fp32_weight", "one_plus_weight"]
HiddenAct = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu", "relu2"]
NO_STEP_LIMITS = (0.0, math.inf)
SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
ATTENTION = "attention"
"""The name of FULL in transformers 4."""
QKNorm = Literal["per_head", "all_heads", "post_rope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of multi-head latent attention (MLA): keys and values are projections of one short
    latent vector per token. Fields have the names of the keys in config.json.

    Attributes:
        kv_lora_rank: elements of the latent vector.
        q_lora_rank: elements of the latent vector of queries; None: queries are a projection of the
            hidden state.
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
        """Elements per token in the KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Multipliers:
    """The multipliers of Falcon-H1, whose layers have Mamba and attention in parallel. Fields have
    the names of the keys in config.json.

    Attributes:
        ssm_in_multiplier, attention_in_multiplier: factors on the inputs of Mamba and attention.
        ssm_multipliers: factors on z, x, b, c and dt of Mamba.
        ssm_out_multiplier, attention_out_multiplier: factors on the outputs.
        mlp_multipliers: factors on the MLP's gate before its activation, and on the MLP's output.
    """

    ssm_in_multiplier: float
    attention_in_multiplier: float
    ssm_multipliers: tuple[float, ...]
    ssm_out_multiplier: float
    attention_out_multiplier: float
    mlp_multipliers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """Gemma 4: layers have two shapes, and the last layers may attend to the KV cache of earlier
    ones.

    Attributes:
        shapes: (head dim, number of KV heads) of layers with a sliding window, and of layers with
            full attention.
        keys_are_values: in layers with full attention, keys and values are one projection.
        num_kv_shared: how many of the last layers have no KV cache. Each uses the KV cache of the
            last layer of its shape that has one.
        shared_mlp_factor: the width of the MLP in these layers, relative to the other layers.
        input_size: width of the per-layer input embeddings; 0: there are none.
    """

    shapes: tuple[tuple[int, int], tuple[int, int]]
    keys_are_values: bool
    num_kv_shared: int
    shared_mlp_factor: int
    input_size: int

    @property
    def largest_shape(self) -> tuple[int, int]:
        """The shape with the larger KV cache."""
        return max(self.shapes, key=math.prod)

    def layers_per_slice(self, window: int | None) -> int:
        """How many layers with this window (None: full attention) share a slice of the KV cache."""
        return math.prod(self.largest_shape) // math.prod(self.shapes[window is None])

    def slices(self, windows: Sequence[int | None]) -> list[tuple[int, ...]]:
        """The layers with a KV cache, grouped by the slice that they share."""
        cached, found = windows[: len(windows) - self.num_kv_shared], []
        for window in dict.fromkeys(cached):
            layers = [n for n, layer_window in enumerate(cached) if layer_window == window]
            size = self.layers_per_slice(window)
            found += [tuple(layers[n : n + size]) for n in range(0, len(layers), size)]
        return sorted(found)


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer, the embeddings and the head; the defaults are Llama's. Fields are named
    after keys in config.json with the same meaning, where there is one.

    Norms:
        norms: "pre": pre-norm, before attention and MLP; "post": post-norm, after them; "sandwich":
            both.
        norm: "rms": RMSNorm in the model's dtype; "fp32_weight": the result is rounded to the
            model's dtype after the multiplication by the weight; "one_plus_weight": as fp32_weight,
            with the factor 1 + weight.
        qk_norm: the norm of queries and keys. "per_head": per head, before RoPE; "post_rope": per
            head, after RoPE; "all_heads": over all heads together; None: there is none.
    Attention:
        qkv_bias, output_bias: the projections have biases.
        output_gate: the output of attention is multiplied by the sigmoid of a projection. Its
            weight in the checkpoint: "q_proj": a part of the rows of q_proj; "per_head": a matrix
            of its own, gate_proj, with one output per head.
        attention_multiplier: factor on q.k; None: head_dim ** -0.5.
        attn_logit_softcapping: c: scores become c * tanh(x / c); None: no soft cap.
        attention_sinks: each head has a learned score in the sum of its softmax
            (`AttentionSpec.sinks`).
        mla: the sizes of multi-head latent attention (MLA); None: ordinary keys and values.
    Positions:
        rotary_dim: RoPE is applied to the first rotary_dim dimensions of a head; None: to all.
        rope_interleaved: RoPE rotates pairs of neighbouring dimensions, instead of pairs with one
            dimension from each half of the head.
    MLP:
        hidden_act: the activation of MLP and experts, which are down(act(gate(x)) * up(x)); a key
            of `layers.kernels.GATES`. "relu2": they have no gate, and are down(relu(up(x)) ** 2).
        mlp_bias: the projections of the MLP have biases.
    Embeddings, residuals, head:
        embedding_multiplier, residual_multiplier, logit_scale: factors on the embeddings, on the
            outputs of attention and MLP before they are added to the residual, and on logits.
        final_logit_softcapping: as attn_logit_softcapping, on logits.
    Checkpoint:
        fused_qkv: q, k and v are one tensor in the checkpoint.
        fused_gate_up: gate and up are one tensor in the checkpoint.
    Each for a single family:
        gemma4: Gemma 4: the two shapes of layers; None: all layers have the same shape.
        falcon_h1: Falcon-H1: the multipliers of its layers, which have Mamba and attention in
            parallel; None: another family.
        layers_block_type: Nemotron-H: per layer the kind of its single block, as in the config;
            None: each layer has a mixer and an MLP.
    """

    norms: Norms = "pre"
    norm: NormKind = "rms"
    qk_norm: QKNorm | None = None

    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: Literal[False, "q_proj", "per_head"] = False
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    attention_sinks: bool = False
    mla: MLAConfig | None = None

    rotary_dim: int | None = None
    rope_interleaved: bool = False

    hidden_act: HiddenAct = "silu"
    mlp_bias: bool = False

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None

    fused_qkv: bool = False
    fused_gate_up: bool = False

    gemma4: Gemma4Config | None = None
    falcon_h1: FalconH1Multipliers | None = None
    layers_block_type: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """The recurrent layers: linear attention, Mamba-2 and short convolutions. They keep a state of
    fixed size per sequence instead of keys and values.

    Attributes:
        kind: "delta": the gated delta rule (a matrix per value head) after a short convolution;
            "mamba": Mamba-2 (a matrix per head) after a short convolution; "conv": only the short
            convolution, between two gates. For "mamba" the value heads are Mamba's heads, the key
            heads are its groups, and `key_dim` is its state size, the width of b and c.
        layers: indices of the recurrent layers.
        kernel: size of the convolution's kernel [tokens].
        channels: channels of the convolution.
        num_key_heads, num_value_heads, key_dim, value_dim: number and dimensions of the heads; each
            key head is used by num_value_heads / num_key_heads adjacent value heads.
        fused_qkvz: the checkpoint stores queries, keys, values and gates as one tensor, grouped by
            key head.
        tiled: the input of the output projection has its value heads in another order: the first
            value head of each key head, then the second of each.
        bias: "conv": the projections and the convolution have biases; "mamba": the input projection
            has a bias.
        conv_bias, output_bias: "mamba": the convolution and the output projection have biases.
        norm: "mamba": the norm is applied after the gate ("after_gate") or before it
            ("before_gate"); None: there is no norm.
        time_step_limits: "mamba": the range of dt.
    """

    kind: Literal["delta", "conv", "mamba"]
    layers: tuple[int, ...]
    kernel: int
    channels: int
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    fused_qkvz: bool = False
    tiled: bool = False
    bias: bool = False
    conv_bias: bool = False
    output_bias: bool = False
    norm: Literal["after_gate", "before_gate"] | None = None
    time_step_limits: tuple[float, float] = NO_STEP_LIMITS

    @property
    def size(self) -> int:
        """Elements of the state of one layer and one sequence."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return matrices + (self.kernel - 1) * self.channels


@checked(UnsupportedModelError)
@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: in `layers` the MLP is replaced by `num_experts` smaller MLPs, of which
    each token uses `num_experts_per_tok`.

    Attributes:
        intermediate_size: the intermediate size of each expert.
        layers: indices of the layers with experts.
        score: the function of the router logits; "softmax" is normalized over all experts.
        norm_topk_prob: the weights of a token's experts are divided by their sum, which is clamped
            to at least `norm_min`, plus `norm_epsilon`.
        correction_bias: the checkpoint has a bias that affects only the selection of experts, not
            their weights; "row": it is stored as a matrix with one row.
        num_groups, groups_per_token: experts form num_groups groups; each token selects its experts
            from its groups_per_token best groups.
        best_of_group: how many of a group's best experts are summed to the score of the group.
        scaling_factor: factor on the weights.
        shared_size: intermediate size of the shared expert, which all tokens use; 0: none.
        shared_gate: the output of the shared expert is multiplied by a learned sigmoid.
        bias: the router, and both matrices of each expert, have biases.
        inputs_first: the stacked matrices are [E, inputs, outputs], except in MXFP4; outputs of
            gate and up alternate.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    layers: tuple[int, ...]
    norm_topk_prob: bool = True
    norm_epsilon: float = 0.0
    norm_min: float = 0.0
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool | Literal["row"] = False
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    scaling_factor: float = 1.0
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    inputs_first: bool = False
