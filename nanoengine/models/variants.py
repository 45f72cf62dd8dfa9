"""What other families have in place of the parts of `decoder.py`, as `LayerPlan` says it.

    VariantLM         a head that scales or caps logits
    VariantDecoder    embeddings that are scaled; several kinds of rotation
    VariantLayer      norms behind attention and MLP too, or only there, or one before both; other
                      MLPs; layers that keep a state in place of keys and values
    VariantAttention  rows stored otherwise, factors, soft caps, sinks, gates, other norms of heads

Taken by `loader.py` for a config that asks for any of them. Experts (`moe.py`) and states
(`states.py`) are loaded for configs that have them.

Legend: T tokens, L rows of logits, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.attention.base import AttentionSpec, Rotation, rotate
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import LayerPlan
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.errors import ConfigError
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.kernels import Masks, empty_parameter
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, RowParallelLinear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.other_linears import OneTensor, OneTensorQKV, OtherQKV
from nanoengine.layers.other_norms import LayerNorm, OtherHeadNorm, WidthNorm, make_norm
from nanoengine.layers.other_rotary import NoRotary, PartialRotary, head_order
from nanoengine.layers.rotary import RotaryEmbedding
from nanoengine.models.decoder import (
    CausalLM,
    Decoder,
    DecoderLayer,
    GatedMLP,
    Layers,
    SelfAttention,
    taken,
)

Norm = RMSNorm | LayerNorm | None


class VariantLM(CausalLM):
    """A language model of any family, on one rank."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        self.config = config
        self.model = VariantDecoder(config, context)
        plan, tied = config.plan, config.tie_word_embeddings
        capped = plan.logit_scale != 1 or plan.logit_softcap is not None
        head = partial(CappedHead, plan) if capped else OutputHead
        self.lm_head = head("lm_head", self.model.embed_tokens, tied=tied, context=context)
        if config.states is not None:
            from nanoengine.models.states import StateLayer

            self.state_layers = [m for m in self.modules() if isinstance(m, StateLayer)]

    @property
    def graph_safe(self) -> bool:
        mlps = [layer.mlp for layer in self.model.layers]
        # Why not states: the host looks for their slots.
        return self.config.states is None and all(getattr(mlp, "graph_safe", True) for mlp in mlps)


class CappedHead(OutputHead):
    """An output head whose logits are scaled, and bent to at most a cap.

    Why the hidden states are scaled, and not the logits: they are fewer.
    """

    def __init__(self, plan: LayerPlan, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale, self.cap = plan.logit_scale, plan.logit_softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._capped(super().forward(self._scaled(hidden)))

    def argmax(
        self, hidden: torch.Tensor, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.ranks > 1:
            return None
        found = self.method.argmax(self._scaled(hidden), self.cap, masks)
        return None if found is None else (found[0], self._capped(found[1]))

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.scale == 1 else hidden * self.scale

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class VariantDecoder(Decoder):
    """The stack of layers, with a list of rotations in place of one."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        sizes, scale = (config.vocab_size, config.hidden_size), config.plan.embedding_scale
        embedding = Embedding if scale == 1 else partial(ScaledEmbedding, scale)
        self.embed_tokens = embedding(*sizes, context=context)
        kinds = list(dict.fromkeys(config.ropes))
        self.rotary = Rotaries(kinds, config, context)
        self.layers = nn.ModuleList(
            VariantLayer(index, kinds.index(rope), config, context)
            for index, rope in enumerate(config.ropes)
        )
        self.stack: list[Layers] = list(self.layers)
        self.norm = model_norm(config, context)


class ScaledEmbedding(Embedding):
    """An embedding times the family's factor."""

    def __init__(self, scale: float, *sizes: int, context: ModelContext) -> None:
        super().__init__(*sizes, context=context)
        # Why rounded: Gemma's own code keeps the factor in the model's dtype.
        self.scale = torch.tensor(scale).to(context.dtype).item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * self.scale


class Rotaries(Layer):
    """Kinds of rotation: positions [T] -> one of each."""

    def __init__(
        self, kinds: list[RopeConfig | None], config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__()
        sizes, turned = (config.head_dim, config.max_position_embeddings), config.plan.rotary_dim
        self.each = nn.ModuleList()
        for rope in kinds:
            if rope is None:
                rotary: RotaryEmbedding = NoRotary(rope, *sizes, context=context)
            elif turned is not None:
                rotary = PartialRotary(rope, *sizes, rotary_dim=turned, context=context)
            else:
                rotary = RotaryEmbedding(rope, *sizes, context=context)
            self.each.append(rotary)

    def forward(self, positions: torch.Tensor) -> list[Rotation]:
        return [rotary(positions) for rotary in self.each]


def model_norm(config: ModelConfig, context: ModelContext) -> RMSNorm | LayerNorm:
    """A norm over the hidden size, of the family's kind."""
    plan = config.plan
    return make_norm(
        plan.norm, config.hidden_size, config.rms_norm_eps, bias=plan.norm_bias, context=context
    )


class VariantLayer(DecoderLayer):
    """One layer of any family.

    Attributes:
        rotation: which of the model's kinds of rotation the layer has.
        mixer: where rows look at others: attention, or what keeps a state in place of it.
        needs_torch: it is of a form that no kernel for whole layers has.
    """

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        Layer.__init__(self)
        self.rotation, path = rotation, f"model.layers.{index}"
        mixer = make_mixer(path, index, config, context)
        setattr(self, mixer.name, mixer)  # as checkpoints call it
        self.mixer, self.mlp = mixer, make_mlp(f"{path}.mlp", index, config, context)
        norms, self.scale = config.plan.norms, config.plan.residual_scale
        self.is_parallel = norms == "parallel"
        before, behind = norms != "behind", norms in ("behind", "both")

        def norm(wanted: bool) -> Norm:
            return model_norm(config, context) if wanted else None

        self.input_layernorm = norm(before)
        self.attention_output_norm = norm(behind)
        self.post_attention_layernorm = norm(before and not self.is_parallel)
        self.mlp_output_norm = norm(behind)

    @property
    def needs_torch(self) -> bool:
        return self.is_parallel or getattr(self.mixer, "needs_torch", True)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = summed(self.input_layernorm, x, residual)
        attended = self.mixer(x, rotations[self.rotation], batch, rows)
        residual = taken(residual, rows)
        if self.is_parallel:
            return self._added(None, attended + self.mlp(taken(x, rows))), residual
        attended = self._added(self.attention_output_norm, attended)
        x, residual = summed(self.post_attention_layernorm, attended, residual)
        return self.mlp_part(x), residual

    def mlp_part(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the residual, x being normed already where a norm is before it."""
        return self._added(self.mlp_output_norm, self.mlp(x))

    def _added(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """What attention or MLP adds to the residual."""
        x = x if norm is None else norm(x, None)[0]
        return x if self.scale == 1 else x * self.scale


def summed(
    norm: Norm, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x + residual, x + residual); no norm: the sum twice; no residual: x alone."""
    if norm is not None:
        return norm(x, residual)
    total = x if residual is None else x + residual
    return total, total


def make_mixer(path: str, index: int, config: ModelConfig, context: ModelContext) -> Layer:
    """What layer `index`, whose full name is `path`, has where others have attention."""
    states = config.states
    if states is not None and index in states.layers:
        from nanoengine.models.states import STATE_LAYERS

        kind = STATE_LAYERS[states.kind]
        return kind(f"{path}.{kind.name}", config, context)
    return VariantAttention(f"{path}.{VariantAttention.name}", index, config, context)


def make_mlp(path: str, index: int, config: ModelConfig, context: ModelContext) -> Layer:
    """The MLP of layer `index`, whose full name is `path`: [T, hidden_size] -> the same."""
    plan = config.plan
    gated = OneTensorMLP if plan.merged or plan.merged_gate else GatedMLP
    if config.moe is not None and index in config.moe.layers:
        from nanoengine.models.moe import SparseMLP

        return SparseMLP(path, config, context, gated)
    return (gated if plan.gated else PlainMLP)(path, config.intermediate_size, config, context)


class OneTensorMLP(GatedMLP):
    """A gated MLP whose gate and up are one tensor of the checkpoint."""

    linear = OneTensor


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square_(),
}
"""`hidden_act` of a config -> the function of an MLP without a gate, in plain torch everywhere."""


class PlainMLP(Layer):
    """down(act(up(x)))."""

    def __init__(self, path: str, inner: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden = config.plan, config.hidden_size
        self.activation = ACTIVATIONS[plan.activation]
        self.up_proj = MergedLinear(
            f"{path}.up_proj", hidden, {"up_proj": inner}, bias=plan.mlp_bias, context=context
        )
        self.down_proj = RowParallelLinear(
            f"{path}.down_proj", inner, hidden, bias=plan.mlp_bias, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class VariantAttention(SelfAttention):
    """The attention of any family.

    Attributes:
        needs_torch: between projection and attention stands what no backend does.

    Raises:
        ConfigError: the layer has sinks, which the backend does not compute.
    """

    name = "self_attn"
    """Of the module in a checkpoint's layer."""

    def __init__(self, path: str, index: int, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        plan, self.head_dim = config.plan, config.head_dim
        order = head_order(config.head_dim, plan.rotary_dim, interleaved=plan.interleaved)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = (OneTensorQKV if plan.merged else OtherQKV)(
            f"{path}.qkv_proj",
            config.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            bias=plan.qkv_bias,
            head_order=order,
            gated=plan.output_gate,
            context=context,
        )
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj",
            heads * config.head_dim,
            config.hidden_size,
            bias=plan.output_bias,
            context=context,
        )
        self.num_heads = context.shard.split(heads)
        self.num_kv_heads = context.shard.of_heads(kv_heads).split(kv_heads)
        norm = config.head_dim, config.rms_norm_eps, plan.norm, order
        self.head_norm = self.width_norm = self.norm_weights = None
        if plan.head_norm == "width":
            self.width_norm = WidthNorm(heads, kv_heads, *norm, context=context)
            self.norm_weights = self.width_norm.weights
        elif plan.head_norm:
            counts = self.num_heads, self.num_kv_heads
            self.head_norm = OtherHeadNorm(*counts, *norm, context=context)
            self.norm_weights = self.head_norm.weights
        self.norm_is_last = plan.head_norm == "rotated"
        self.sinks = None
        if plan.sinks:
            self._check_sinks(context)
            wide = torch.promote_types(context.dtype, torch.float32)
            self.sinks = empty_parameter((self.num_heads,), wide, context.device)
            self.all_sinks = (heads,), (context.shard.slice(heads, "num_attention_heads"),)
        self.is_gated = plan.output_gate
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            scale=plan.attention_scale or config.head_dim**-0.5,
            sliding_window=config.sliding_windows[index],
            softcap=plan.attention_softcap,
            sinks=self.sinks,
        )
        self.attention = Attention(spec, context.kernels.attention)
        rope = config.ropes[index]
        self.growth = rope.llama_4_scaling_beta if rope else 0.0
        self.original_len = rope.original_max_position_embeddings if rope else 0
        self.norm_is_split = self.width_norm is not None and self.norm_weights is None
        torch_for = self.norm_is_split, self.norm_is_last, self.is_gated, self.growth
        self.needs_torch = any(torch_for)

    @staticmethod
    def _check_sinks(context: ModelContext) -> None:
        backend = context.kernels.attention
        if not backend.takes_sinks:
            raise ConfigError(
                f"attention backend {backend.name} does not compute this model's attention sinks:"
                " set attention_backend='auto'"
            )

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        if self.sinks is None:
            return {}
        shape, part = self.all_sinks
        return {f"{path}.sinks": WeightSlot(shape=shape, part=part, store=self.sinks.copy_)}

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.needs_torch:
            return super().forward(x, rotation, batch, rows)
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        gates = None
        if self.is_gated:
            gates, heads = heads[:, : self.num_heads], heads[:, self.num_heads :].contiguous()
        if self.norm_is_split:
            heads = self.width_norm(heads)
        if self.growth:
            heads[:, : self.num_heads] *= self._query_scale(batch.positions).to(heads.dtype)
        if self.norm_is_last:
            attended = self._attend_normed_last(heads, rotation, batch)
        else:
            attended = self.attention(heads, rotation, self.norm_weights, batch)
        attended = taken(attended, rows)
        if gates is not None:
            attended = attended * taken(gates, rows).sigmoid()
        return self.o_proj(attended.flatten(1))

    def _attend_normed_last(
        self, heads: torch.Tensor, rotation: Rotation, batch: Batch
    ) -> torch.Tensor:
        """Heads are turned in plain torch, then normed, stored and attended."""
        assert self.head_norm is not None
        counts = self.num_heads, self.num_kv_heads
        qk, v = heads.split((sum(counts), self.num_kv_heads), dim=1)
        q, k = self.head_norm(rotate(qk, rotation, None)).split(counts, dim=1)
        return self.attention.backend.forward(q, k, v, self.attention.cache, batch)

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        """How much queries grow with their positions: [T] -> [T, 1, 1]. Source: Llama 4."""
        periods = torch.floor(positions / self.original_len)
        return (1 + self.growth * torch.log(1 + periods)).view(-1, 1, 1)
