"""Replacements for the parts of `decoder.py`, selected by `LayerConfig`, for other families.

    GenericLM         scaled or soft-capped logits
    GenericDecoder    scaled embeddings, several RoPE configurations
    GenericLayer      pre-norms, post-norms or sandwich norms; MLPs without a gate; recurrent layers
                      instead of attention
    GenericAttention  other weight layouts, multipliers, soft caps, sinks, other QK norms; output
                      gates, and everything else that no backend supports

`loader.py` uses them if a config needs any of them. Experts (`moe.py`) and recurrent layers
(`linear_attention.py`) are imported only for configs that have them.

Legend: T tokens, L tokens with logits, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nanoengine.attention.base import AttentionSpec, Rotation, rotate
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.errors import ConfigError
from nanoengine.layers import layouts
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.kernels import Masks, relu2
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear, RowParallelLinear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.norms import AllHeadsNorm, ReorderedHeadNorm, make_norm
from nanoengine.models.decoder import (
    CausalLM,
    Decoder,
    DecoderLayer,
    GatedMLP,
    LayerCall,
    SelfAttention,
    select_rows,
)


class GenericLM(CausalLM):
    """A language model of any family, on one rank."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        self.config = config
        self.model = self.make_decoder(config, context)
        tied, embedding = config.tie_word_embeddings, self.model.embed_tokens
        head = self.lm_head = SoftcapLMHead("lm_head", embedding, tied=tied, context=context)
        head.scale, head.cap = config.plan.logit_scale, config.plan.final_logit_softcapping
        if config.states is not None:
            from nanoengine.models.linear_attention import RecurrentLayer

            self.recurrent_layers = [m for m in self.modules() if isinstance(m, RecurrentLayer)]

    def make_decoder(self, config: ModelConfig, context: ModelContext) -> GenericDecoder:
        """Makes embedding, layers and last norm."""
        return GenericDecoder(config, context, GenericLayer)

    @property
    def graph_safe(self) -> bool:
        return all(getattr(part, "graph_safe", True) for part in self.model.modules())


class SoftcapLMHead(OutputHead):
    """An output head that may scale logits, or have a soft cap (None: it has none).

    Why the hidden states are scaled, not the logits: they have fewer elements.
    """

    scale: float
    cap: float | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._softcap(super().forward(self._scale(hidden)))

    def argmax(
        self, hidden: torch.Tensor, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.ranks > 1:
            return None
        found = self.method.argmax(self._scale(hidden), self.cap, masks)
        return None if found is None else (found[0], self._softcap(found[1]))

    def _scale(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.scale == 1 else hidden * self.scale

    def _softcap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class GenericDecoder(Decoder):
    """A `Decoder` of generic layers, to which a list of rotations is passed instead of one."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, layer: type[GenericLayer]
    ) -> None:
        Layer.__init__(self)
        sizes, scale = (config.vocab_size, config.hidden_size), config.plan.embedding_multiplier
        embedding = Embedding if scale == 1 else partial(ScaledEmbedding, scale)
        self.embed_tokens = embedding(*sizes, context=context)
        ropes = list(dict.fromkeys(config.ropes))
        self.rotary = RotaryEmbeddings([(rope, config) for rope in ropes], context)
        self.layers = nn.ModuleList(
            layer(index, ropes.index(rope), config, context)
            for index, rope in enumerate(config.ropes)
        )
        self.executed_layers: list[LayerCall] = list(self.layers)
        self.norm = make_norm(config, context)


class ScaledEmbedding(Embedding):
    """An embedding times the family's embedding multiplier."""

    def __init__(self, scale: float, *sizes: int, context: ModelContext) -> None:
        super().__init__(*sizes, context=context)
        # Why rounded: Gemma's model code keeps the factor in the model's dtype.
        self.scale = torch.tensor(scale).to(context.dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * self.scale


class RotaryEmbeddings(Layer):
    """Several RoPE configurations: positions [T] -> one rotation per configuration.

    `ropes` has each (None: no RoPE) with the config of its layers.
    """

    def __init__(
        self, ropes: list[tuple[RopeConfig | None, ModelConfig]], context: ModelContext
    ) -> None:
        super().__init__()
        self.rotaries = nn.ModuleList(
            (layouts.PartialRotary if rope else layouts.NoRotary)(rope, config, context)
            for rope, config in ropes
        )

    def forward(self, positions: torch.Tensor) -> list[Rotation]:
        return [rotary(positions) for rotary in self.rotaries]


class GenericLayer(DecoderLayer):
    """One layer of any family.

    Attributes:
        rotation: index of the layer's RoPE configuration.
        mixer: the submodule that mixes tokens: attention, or a recurrent layer.
        needs_torch: no fused kernel supports the layer, so it runs op by op.
    """

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        Layer.__init__(self)
        self.rotation, path = rotation, f"model.layers.{index}"
        mixer = make_mixer(path, index, config, context)
        setattr(self, mixer.name, mixer)  # named as in checkpoints
        self.mixer, self.mlp = mixer, make_mlp(f"{path}.mlp", index, config, context)
        norms, self.scale = config.plan.norms, config.plan.residual_multiplier

        def norm(without: str) -> RMSNorm | None:
            return make_norm(config, context) if norms != without else None

        self.input_layernorm, self.post_attention_layernorm = norm("post"), norm("post")
        self.attention_output_norm, self.mlp_output_norm = norm("pre"), norm("pre")

    @property
    def needs_torch(self) -> bool:
        return getattr(self.mixer, "needs_torch", True)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        attended = self.mixer(x, rotations[self.rotation], batch, rows)
        residual = select_rows(residual, rows)
        attended = self._norm_and_scale(self.attention_output_norm, attended)
        x, residual = add_and_norm(self.post_attention_layernorm, attended, residual)
        return self._norm_and_scale(self.mlp_output_norm, self.mlp(x)), residual

    def _norm_and_scale(self, norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
        """Applies the post-norm, if there is one, and the residual multiplier."""
        x = x if norm is None else norm(x, None)[0]
        return x if self.scale == 1 else x * self.scale


def add_and_norm(
    norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(x + residual), x + residual).

    Without a norm both are the sum; without a residual the sum is x.
    """
    if norm is not None:
        return norm(x, residual)
    total = x if residual is None else x + residual
    return total, total


def make_mixer(path: str, index: int, config: ModelConfig, context: ModelContext) -> Layer:
    """Makes the mixer of layer `index`: attention, or a recurrent layer.

    `path` is the layer's full name.
    """
    states = config.states
    if states is not None and index in states.layers:
        if states.kind == "mamba":
            from nanoengine.models.mamba import MambaMixer as kind
        else:
            from nanoengine.models.linear_attention import RECURRENT_LAYERS

            kind = RECURRENT_LAYERS[states.kind]
        return kind(f"{path}.{kind.name}", config, context)
    if config.plan.mla is not None:
        from nanoengine.models.mla import MLAAttention

        return MLAAttention(f"{path}.{MLAAttention.name}", index, config, context)
    return GenericAttention(f"{path}.{GenericAttention.name}", index, config, context)


def make_mlp(path: str, index: int, config: ModelConfig, context: ModelContext) -> Layer:
    """Makes the MLP of layer `index`, whose full name is `path`: [T, hidden_size] -> the same."""
    plan = config.plan
    gated = PackedGatedMLP if plan.fused_gate_up else ScaledGatedMLP if plan.falcon_h1 else GatedMLP
    kind = PlainMLP if plan.hidden_act == "relu2" else gated
    if config.moe is not None and index in config.moe.layers:
        from nanoengine.models.moe import SparseMLP

        return SparseMLP(path, config, context, kind)
    return kind(path, config.intermediate_size, config, context)


class PackedGatedMLP(GatedMLP):
    """A gated MLP whose gate and up weights are one tensor in the checkpoint."""

    gate_up_class = layouts.FusedTensorLinear


class ScaledGatedMLP(GatedMLP):
    """A gated MLP that multiplies the gate and the output by constants. Source: Falcon-H1."""

    def __init__(self, path: str, size: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, size, config, context)
        assert config.plan.falcon_h1 is not None
        self.multipliers = config.plan.falcon_h1.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=1)
        gate_up = torch.cat((gate * self.multipliers[0], up), dim=1)
        return self.down_proj(self.kernels.gate(gate_up, self.activation)) * self.multipliers[1]


class PlainMLP(Layer):
    """down(relu(up(x)) ** 2): an MLP without a gate; `size` is the intermediate size."""

    def __init__(self, path: str, size: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        bias, hidden = config.plan.mlp_bias, config.hidden_size
        self.up_proj = MergedLinear(
            f"{path}.up_proj", hidden, {"up_proj": size}, bias=bias, context=context
        )
        self.down_proj = RowParallelLinear(
            f"{path}.down_proj", size, hidden, bias=bias, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(relu2(self.up_proj(x)))


class GenericAttention(SelfAttention):
    """The attention of any family. In plain torch it computes what no backend supports: output
    gates, query scales that depend on the position, and QK norms after RoPE or over the heads of
    several ranks.

    Raises:
        ConfigError: the model has attention sinks, which the backend does not support.

    Attributes:
        name: the module's name in a checkpoint's layer.
        num_gates: outputs of the QKV projection before the heads.
        needs_torch: some operations run in plain torch, so no fused kernel supports the layer.
    """

    name = "self_attn"

    def __init__(self, path: str, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, index, config, context)
        plan, rope, spec = config.plan, config.ropes[index], self.attention.spec
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        size = 1 if plan.output_gate == "per_head" else self.head_dim if plan.output_gate else 0
        self.num_gates = size * spec.num_heads
        self.norms_after_rope = plan.qk_norm == "post_rope"
        self.norms_over_ranks = plan.qk_norm == "all_heads" and self.norm_weights is None
        self.scaling_beta = rope.llama_4_scaling_beta if rope else 0.0
        self.original_len = rope.original_max_position_embeddings if rope else 0
        self.needs_torch = bool(self.norms_after_rope or self.norms_over_ranks or self.scaling_beta)

    def make_qkv(self, path: str, config: ModelConfig, context: ModelContext) -> QKVLinear:
        kind = layouts.FusedTensorQKV if config.plan.fused_qkv else layouts.ReorderedQKV
        return kind(path, config, context)

    def make_spec(self, index: int, config: ModelConfig, context: ModelContext) -> AttentionSpec:
        plan, plain = config.plan, super().make_spec(index, config, context)
        heads, backend, self.sinks = config.num_attention_heads, context.kernels.attention, None
        self.sinks_part = (heads,), (context.shard.slice(heads, "num_attention_heads"),)
        if plan.attention_sinks and not backend.supports_sinks:
            raise ConfigError(
                f"attention_backend={backend.name!r} does not support this model's attention sinks:"
                " set attention_backend='auto'"
            )
        if plan.attention_sinks:
            wide = torch.promote_types(context.dtype, torch.float32)
            self.sinks = context.parameter(plain.num_heads, dtype=wide)
        scale = plan.attention_multiplier or plain.scale
        return replace(plain, scale=scale, softcap=plan.attn_logit_softcapping, sinks=self.sinks)

    def make_norm(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> Layer:
        norm = AllHeadsNorm if config.plan.qk_norm == "all_heads" else ReorderedHeadNorm
        return norm(spec, config, context)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        if self.sinks is None:
            return {}
        shape, part = self.sinks_part
        return {f"{path}.sinks": WeightSlot(shape=shape, part=part, store=self.sinks.copy_)}

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if not (self.needs_torch or self.num_gates):
            return super().forward(x, rotation, batch, rows)
        projected = self.qkv_proj(x)
        gates, heads = projected[:, : self.num_gates], projected[:, self.num_gates :].contiguous()
        heads = heads.view(len(x), -1, self.head_dim)
        if self.norms_over_ranks:
            heads = self.head_norm(heads)
        if self.scaling_beta:
            heads[:, : self.num_heads] *= self._query_scale(batch.positions).to(heads.dtype)
        if self.norms_after_rope:
            counts = self.num_heads, self.num_kv_heads
            qk, v = heads.split((sum(counts), self.num_kv_heads), dim=1)
            q, k = self.head_norm(rotate(qk, rotation, None)).split(counts, dim=1)
            attended = self.attention.backend.forward(q, k, v, self.attention.cache, batch)
        else:
            attended = self.attention(heads, rotation, self.norm_weights, batch)
        attended = select_rows(attended, rows)
        if self.num_gates:
            gates = select_rows(gates, rows).sigmoid()
            attended = attended * gates.unflatten(1, (self.num_heads, -1))
        return self.o_proj(attended.flatten(1))

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T] -> the factors of their queries, [T, 1, 1]. Source: Llama 4."""
        periods = torch.floor(positions / self.original_len)
        return (1 + self.scaling_beta * torch.log(1 + periods)).view(-1, 1, 1)
