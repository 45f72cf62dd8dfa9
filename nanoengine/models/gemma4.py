"""Gemma 4: layers of two shapes, shared KV caches, and per-layer input embeddings.

    Gemma4LM         the model; several layers may share one slice of the KV cache
    Gemma4Decoder    computes the per-layer inputs from token ids and embeddings
    Gemma4Layer      attention; MLP and experts in parallel; the per-layer input; a factor
    Gemma4Attention  norms values; values may equal keys, or come from an earlier layer's KV cache

    token ids ─ embed_tokens_per_layer ────────────────────┐
    embeddings ─ per_layer_model_projection ─ norm ── + ── inputs [T, layers, input size]

Full-attention layers and sliding-window layers have different head dims and numbers of KV heads. If
blocks of one kind are m times smaller, m layers of this kind share one slice of the KV cache, which
has the size for one layer of the other kind: block b of the pool is their blocks m b, m b + 1, ...

`loader.py` uses this file if `plan.gemma4` is set. Linear layers, norms and attention use kernels;
the rest is plain torch. On a CPU `layers/cpu_gemma4.py` fuses layers without experts.

Source: the model code of Gemma 4.

Legend: T tokens, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.attention.base import AttentionBackend, AttentionSpec, Rotation, rotate
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import Gemma4Config, MoEConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, full_slots
from nanoengine.errors import ConfigError
from nanoengine.layers.attention import Attention
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.layouts import replicated_linear
from nanoengine.layers.linear import MergedLinear
from nanoengine.layers.moe import Experts, Router
from nanoengine.layers.norms import ReorderedHeadNorm, make_norm
from nanoengine.models.decoder import select_rows
from nanoengine.models.generic import (
    GenericAttention,
    GenericDecoder,
    GenericLayer,
    GenericLM,
    RotaryEmbeddings,
    ScaledEmbedding,
    make_mlp,
)


def gemma4_of(config: ModelConfig) -> Gemma4Config:
    """The part of the config that only this model has."""
    assert config.plan.gemma4 is not None
    return config.plan.gemma4


def config_for_layer(config: ModelConfig, index: int) -> ModelConfig:
    """Returns the config of a model whose layers all have the shape of layer `index`."""
    gemma4 = gemma4_of(config)
    head_dim, kv_heads = gemma4.shapes[config.sliding_windows[index] is None]
    first = config.num_hidden_layers - gemma4.num_kv_shared
    size = config.intermediate_size * (gemma4.shared_mlp_factor if index >= first else 1)
    return replace(config, head_dim=head_dim, num_key_value_heads=kv_heads, intermediate_size=size)


class Gemma4LM(GenericLM):
    """A language model with layers of two shapes, on one rank.

    Raises:
        ConfigError: one kind of layer has fewer KV heads than there are ranks.
    """

    def make_decoder(self, config: ModelConfig, context: ModelContext) -> Gemma4Decoder:
        gemma4, ranks = gemma4_of(config), context.shard.world_size
        min_kv_heads = min(heads for _, heads in gemma4.shapes)
        if ranks > min_kv_heads and len({heads for _, heads in gemma4.shapes}) > 1:
            raise ConfigError(
                f"tensor_parallel_size={ranks} must be at most {min_kv_heads}, the smallest number"
                " of KV heads of this model's layers"
            )
        return Gemma4Decoder(config, context)

    @property
    def attention_layers(self) -> list[SharedSlice]:
        """One entry per slice of the KV cache, ordered by the slice's first layer."""
        gemma4 = gemma4_of(self.config)
        layers = [layer.mixer.attention for layer in self.model.layers]
        slices = gemma4.slices(self.config.sliding_windows)
        specs = [layer.spec for layer in layers]
        widest = max(specs, key=lambda spec: spec.num_kv_heads * spec.head_dim)
        return [SharedSlice([layers[n] for n in indices], widest) for indices in slices]


class SharedSlice:
    """Layers that share one slice of the KV cache; it is bound like an `Attention`.

    Attributes:
        spec: the spec of a layer of the larger shape, which fills a slice alone.
    """

    def __init__(self, layers: Sequence[Attention], spec: AttentionSpec) -> None:
        self.layers, self.spec = layers, spec

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, group: int) -> None:
        """Binds each layer to its part of the slice."""
        for index, layer in enumerate(self.layers):
            parts = [self._part(cache, layer, index) for cache in (k_cache, v_cache)]
            layer.bind(*parts, group)

    def _part(self, cache: torch.Tensor, layer: Attention, index: int) -> torch.Tensor:
        """Returns the slice as blocks of the layer's size, starting at the first block of layer
        `index` of this slice."""
        heads, dim = layer.spec.num_kv_heads, layer.spec.head_dim
        tokens_first = layer.backend.kv_layout == "PKD"
        size = cache.shape[1] if tokens_first else cache.shape[2]
        block = (size, heads, dim) if tokens_first else (heads, size, dim)
        flat = cache.flatten()[index * math.prod(block) :]
        count = len(flat) // math.prod(block)
        return flat[: count * math.prod(block)].view(count, *block)


class Gemma4Decoder(GenericDecoder):
    """Embeddings, per-layer input embeddings, layers and last norm."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        plan, hidden, depth = config.plan, config.hidden_size, config.num_hidden_layers
        gemma4 = gemma4_of(config)
        self.embed_tokens = ScaledEmbedding(
            plan.embedding_multiplier, config.vocab_size, hidden, context=context
        )
        configs = [config_for_layer(config, index) for index in range(depth)]
        windows = list(dict.fromkeys(config.sliding_windows))
        firsts = map(config.sliding_windows.index, windows)
        self.rotary = RotaryEmbeddings([(config.ropes[n], configs[n]) for n in firsts], context)
        self.input_size, size = gemma4.input_size, depth * gemma4.input_size
        if size:
            self.embed_tokens_per_layer = ScaledEmbedding(
                gemma4.input_size**0.5, config.vocab_size, size, context=context
            )
            self.per_layer_model_projection = replicated_linear(
                "model.per_layer_model_projection", hidden, size, context
            )
            sizes = replace(config, hidden_size=gemma4.input_size)
            self.per_layer_projection_norm = make_norm(sizes, context)
            self.projection_scale = hidden**-0.5
        self.backend, self.first_kv_shared = context.kernels.attention, depth - gemma4.num_kv_shared
        self.layers = nn.ModuleList()
        last: dict[int | None, Gemma4Attention] = {}
        for index, window in enumerate(config.sliding_windows):
            kv_source = last[window] if index >= self.first_kv_shared else None
            layer = Gemma4Layer(index, windows.index(window), configs[index], kv_source, context)
            self.layers.append(layer)
            if kv_source is None:
                last[window] = layer.mixer
        self.executed_layers = list(self.layers)
        self.norm = make_norm(config, context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed_tokens(batch.token_ids)
        inputs = self._inputs(x, batch.token_ids) if self.input_size else None
        rotations, index = self.rotary(batch.positions), 0
        for layer in self.executed_layers:
            rows = batch.logits_indices
            has_other_tokens = rows is not None and len(rows) < batch.num_tokens
            if index == self.first_kv_shared and has_other_tokens:
                if not len(rows):  # all tokens are chunks of longer prompts
                    return x[:0]
                batch = logits_tokens_only(batch, self.backend)
                x, inputs = x[rows], None if inputs is None else inputs[rows]
                rotations = self.rotary(batch.positions)
            index += layer.num_layers
            rows = batch.logits_indices if index == len(self.layers) else None
            x = layer(x, rotations, batch, rows, inputs)
        return self.norm(x, None)[0]

    def _inputs(self, embedded: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Computes the per-layer inputs of each token: [T, layers, input size]."""
        shape = len(token_ids), -1, self.input_size
        projected = self.per_layer_model_projection(embedded) * self.projection_scale
        normed, _ = self.per_layer_projection_norm(projected.view(-1, self.input_size), None)
        return (normed.view(shape) + self.embed_tokens_per_layer(token_ids).view(shape)) * 2**-0.5


def logits_tokens_only(batch: Batch, backend: AttentionBackend) -> Batch:
    """Makes a batch of the tokens with logits only, each as its own sequence, without reading
    values on the host.

    Why: layers that store no keys and values do not need the other tokens, and most prompts have
    one token with logits.
    """
    indices = batch.logits_indices
    assert indices is not None
    starts, count = batch.query_start_loc[1:], len(indices)
    seq_indices = torch.searchsorted(starts, indices.to(starts.dtype), right=True)
    positions = batch.positions[indices]
    found = replace(
        batch,
        token_ids=batch.token_ids[indices],
        positions=positions,
        slot_mapping=batch.slot_mapping[:, indices],
        query_start_loc=torch.arange(count + 1, dtype=starts.dtype, device=starts.device),
        seq_lens=(positions + 1).to(batch.seq_lens.dtype),
        block_tables=batch.block_tables[:, seq_indices],
        logits_indices=None,
        num_decodes=count,
        max_query_len=1,
    )
    found.attention = backend.prepare(found)
    return found


class Gemma4Layer(GenericLayer):
    """One layer.

    Args:
        kv_source: the attention whose keys and values this layer uses; None: it has its own.

    Attributes:
        num_layers: 1; a fused call of several layers has their number.
    """

    num_layers = 1

    def __init__(
        self,
        index: int,
        rotation: int,
        config: ModelConfig,
        kv_source: Gemma4Attention | None,
        context: ModelContext,
    ) -> None:
        Layer.__init__(self)
        path, plan, moe = f"model.layers.{index}", config.plan, config.moe
        gemma4, hidden = gemma4_of(config), config.hidden_size
        self.index, self.rotation, self.scale = index, rotation, plan.residual_multiplier
        self.self_attn = self.mixer = Gemma4Attention(
            f"{path}.self_attn", index, config, kv_source, context
        )
        self.mlp = make_mlp(f"{path}.mlp", index, replace(config, moe=None), context)
        self.experts = None
        norms = "input_layernorm", "attention_output_norm", "post_attention_layernorm"
        norms += ("mlp_output_norm",)
        if moe is not None:
            # Why `gate` too: kernels read the names of `SparseMLP`.
            self.router = self.gate = ScaledRouter(f"{path}.router", hidden, moe, config, context)
            self.experts = Experts(f"{path}.experts", hidden, moe, plan.hidden_act, context=context)
            self.routed: Callable[..., torch.Tensor] = self._sequential_experts
            norms += "post_mlp_norm", "post_experts_norm", "pre_experts_norm"
        if gemma4.input_size:
            self.per_layer_input_gate = replicated_linear(
                f"{path}.per_layer_input_gate", hidden, gemma4.input_size, context
            )
            self.per_layer_projection = replicated_linear(
                f"{path}.per_layer_projection", gemma4.input_size, hidden, context
            )
            norms += ("post_per_layer_input_norm",)
        for name in norms:
            setattr(self, name, make_norm(config, context))
        self.layer_scalar = context.parameter(1)

    @property
    def needs_torch(self) -> bool:
        return self.experts is not None

    @property
    def graph_safe(self) -> bool:
        """See `SparseMLP.graph_safe`; always True without experts."""
        return self.experts is None or getattr(self.routed, "graph_safe", False)

    def forward(
        self,
        x: torch.Tensor,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] -> hidden states of `rows`, all if None.

        Args:
            inputs: the per-layer inputs of all layers, [T, layers, input size].
        """
        normed, x = self.input_layernorm(x, None)
        attended = self.mixer(normed, rotations[self.rotation], batch, rows)
        attended = self._norm_and_scale(self.attention_output_norm, attended)
        normed, x = self.post_attention_layernorm(attended, select_rows(x, rows))
        x = x + self._mlp_and_experts(normed, x)
        if inputs is not None:
            layer_input = select_rows(inputs[:, self.index], rows)
            gate = self.per_layer_input_gate(x)
            gated = F.gelu(gate, approximate="tanh") * layer_input
            projected, norm = self.per_layer_projection(gated), self.post_per_layer_input_norm
            x = x + self._norm_and_scale(norm, projected)
        return x * self.layer_scalar

    def _mlp_and_experts(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Applies MLP and experts, in parallel, and their norms; returns what is added to x."""
        if self.experts is None:
            return self._norm_and_scale(self.mlp_output_norm, self.mlp(normed))
        dense = self._norm_and_scale(self.post_mlp_norm, self.mlp(normed))
        sparse = self.routed(self._norm_and_scale(self.pre_experts_norm, x), x)
        both = dense + self._norm_and_scale(self.post_experts_norm, sparse)
        return self._norm_and_scale(self.mlp_output_norm, both)

    def _sequential_experts(self, x: torch.Tensor, router_input: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.router(router_input))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return full_slots(path, layer_scalar=self.layer_scalar)


class Gemma4Attention(GenericAttention):
    """Attention that also norms values; this norm has no weight. Values may be the projected keys.

    Attributes:
        attention: the layer's own; with a `kv_source`, the source's.
    """

    def __init__(
        self,
        path: str,
        index: int,
        config: ModelConfig,
        kv_source: Gemma4Attention | None,
        context: ModelContext,
    ) -> None:
        gemma4 = gemma4_of(config)
        # Why before super().__init__: the projections and norms made there depend on these.
        self.is_kv_shared, self.eps = kv_source is not None, config.rms_norm_eps
        self.keys_are_values = gemma4.keys_are_values and config.sliding_windows[index] is None
        super().__init__(path, index, config, context)
        spec = self.attention.spec
        self.counts = spec.num_heads, spec.num_kv_heads
        if kv_source is not None:
            self.attention = kv_source.attention

    def make_qkv(self, path: str, config: ModelConfig, context: ModelContext) -> MergedLinear:
        shard, kv_heads = context.shard, config.num_key_value_heads
        parts = {"q_proj": config.num_attention_heads * config.head_dim}
        if not self.is_kv_shared:
            parts["k_proj"] = kv_heads * config.head_dim
        if not self.is_kv_shared and not self.keys_are_values:
            parts["v_proj"] = kv_heads * config.head_dim
        shards = dict.fromkeys(parts, shard.for_kv_heads(kv_heads)) | {"q_proj": shard}
        return MergedLinear(
            path, config.hidden_size, parts, bias=config.plan.qkv_bias, context=context,
            shards=shards,
        )  # fmt: skip

    def make_norm(
        self, spec: AttentionSpec, config: ModelConfig, context: ModelContext
    ) -> ReorderedHeadNorm:
        return (QueryNorm if self.is_kv_shared else ReorderedHeadNorm)(spec, config, context)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        attention, norm = self.attention, self.head_norm.weights
        if self.is_kv_shared:
            q = rotate(heads, rotation, norm)
            attended = attention.backend.attend(q, attention.cache, batch)
        else:
            values = F.rms_norm(heads[:, -self.counts[1] :], (self.head_dim,), None, self.eps)
            kept = heads if self.keys_are_values else heads[:, : sum(self.counts)]
            attended = attention(torch.cat((kept, values), dim=1), rotation, norm, batch)
        return self.o_proj(select_rows(attended, rows).flatten(1))


class QueryNorm(ReorderedHeadNorm):
    """The QK norm of a layer that projects queries only."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(replace(spec, num_kv_heads=0), config, context)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots = super().weight_slots(path).items()
        return {name: slot for name, slot in slots if name.endswith("q_norm.weight")}


class ScaledRouter(Router):
    """Norms its input, and multiplies weights by one learned factor per expert.

    Nothing here may synchronize with the host, because CUDA graphs capture it.
    """

    def __init__(
        self, path: str, hidden: int, moe: MoEConfig, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(path, hidden, moe, context=context)
        self.eps, self.hidden = config.rms_norm_eps, hidden
        self.scale = context.parameter(hidden)
        self.per_expert_scale = context.parameter(moe.num_experts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, (self.hidden,), None, self.eps)
        return super().logits(normed * self.scale * self.hidden**-0.5)

    def scale_weights(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return weights * self.per_expert_scale[experts]

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        scales = {"scale": self.scale, "per_expert_scale": self.per_expert_scale}
        return self.slots_of(f"{path}.proj", MatrixPart(self.shape)) | full_slots(path, **scales)
