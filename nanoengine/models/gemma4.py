"""Gemma 4: layers of two shapes, shared KV caches, and per-layer input embeddings.

    Gemma4LM         the model; several of its layers' caches may share a slice
    Gemma4Decoder    computes the per-layer inputs from the token ids and their embeddings
    Gemma4Layer      attention, MLP and experts in parallel, the per-layer input, then a factor
    Gemma4Attention  values are normed, or equal the keys; or an earlier layer's KV is used

    token ids ─ embed_tokens_per_layer ────────────────────┐
    embeddings ─ per_layer_model_projection ─ norm ── + ── inputs [T, layers, input size]

Layers with full attention have another head dim and another number of KV heads than layers with a
sliding window. A layer of the narrower kind needs only a fraction of a slice of the KV cache, so
several of them share one: block b of the pool is their blocks m b, m b + 1, ...

`loader.py` uses this file if `plan.gemma4` is set. Everything except matrix products, norms and
attention is plain torch; on a CPU `layers/cpu_gemma4.py` has compiled calls for layers without
experts.

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
from nanoengine.checkpoint.slots import WeightSlot, full_slots
from nanoengine.errors import ConfigError
from nanoengine.layers.attention import Attention
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.layouts import replicated_linear
from nanoengine.layers.linear import MergedLinear
from nanoengine.layers.moe import Experts
from nanoengine.layers.norms import ReorderedHeadNorm, make_norm
from nanoengine.layers.routers import ScaledRouter
from nanoengine.models.decoder import select_rows
from nanoengine.models.generic import (
    ACTIVATIONS,
    GenericAttention,
    GenericDecoder,
    GenericLayer,
    GenericLM,
    RotaryEmbeddings,
    ScaledEmbedding,
    make_mlp,
)


def of_layer(config: ModelConfig, index: int) -> ModelConfig:
    """Returns the config of a model in which all layers have the shape of layer `index`."""
    varied = config.plan.gemma4
    assert varied is not None
    head_dim, kv_heads = varied.shapes[config.sliding_windows[index] is None]
    first = config.num_hidden_layers - varied.num_kv_shared
    inner = config.intermediate_size * (varied.shared_mlp_factor if index >= first else 1)
    return replace(config, head_dim=head_dim, num_key_value_heads=kv_heads, intermediate_size=inner)


class Gemma4LM(GenericLM):
    """A language model with layers of two shapes, on one rank.

    Raises:
        ConfigError: there are more ranks than KV heads in one kind of layer.
    """

    def make_decoder(self, config: ModelConfig, context: ModelContext) -> Gemma4Decoder:
        varied, ranks = config.plan.gemma4, context.shard.world_size
        assert varied is not None
        least = min(heads for _, heads in varied.shapes)
        if ranks > least and len({heads for _, heads in varied.shapes}) > 1:
            raise ConfigError(
                f"tensor_parallel_size={ranks} must be at most {least}, the KV heads of this"
                " model's layers that have the fewest"
            )
        return Gemma4Decoder(config, context)

    @property
    def attention_layers(self) -> list[SharedSlice]:
        """What the slices of the KV cache are bound to, ordered by the first layer of each
        slice."""
        varied = self.config.plan.gemma4
        assert varied is not None
        layers = [layer.mixer.attention for layer in self.model.layers]
        slices = varied.slices(self.config.sliding_windows)
        specs = [layer.spec for layer in layers]
        widest = max(specs, key=lambda spec: spec.num_kv_heads * spec.head_dim)
        return [SharedSlice([layers[n] for n in numbers], widest) for numbers in slices]


class SharedSlice:
    """Layers that share one slice of the KV cache; bound like an `Attention`.

    Attributes:
        spec: the spec of a layer that fills the slice alone.
    """

    def __init__(self, layers: Sequence[Attention], spec: AttentionSpec) -> None:
        self.layers, self.spec = layers, spec

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, group: int) -> None:
        """Gives each layer its part of the slice."""
        for number, layer in enumerate(self.layers):
            parts = [self._part(cache, layer, number) for cache in (k_cache, v_cache)]
            layer.bind(*parts, group)

    def _part(self, cache: torch.Tensor, layer: Attention, number: int) -> torch.Tensor:
        """Views the slice from the first block of the `number`th layer, in blocks of that layer's
        size."""
        heads, dim = layer.spec.num_kv_heads, layer.spec.head_dim
        in_order = layer.backend.kv_layout == "PKD"
        size = cache.shape[1] if in_order else cache.shape[2]
        inner = (size, heads, dim) if in_order else (heads, size, dim)
        flat = cache.flatten()[number * math.prod(inner) :]
        count = len(flat) // math.prod(inner)
        return flat[: count * math.prod(inner)].view(count, *inner)


class Gemma4Decoder(GenericDecoder):
    """The layers and their per-layer input embeddings."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        plan, hidden, depth = config.plan, config.hidden_size, config.num_hidden_layers
        varied = plan.gemma4
        assert varied is not None
        self.embed_tokens = ScaledEmbedding(
            plan.embedding_multiplier, config.vocab_size, hidden, context=context
        )
        configs = [of_layer(config, index) for index in range(depth)]
        kinds = list(dict.fromkeys(config.sliding_windows))
        firsts = map(config.sliding_windows.index, kinds)
        self.rotary = RotaryEmbeddings([(config.ropes[n], configs[n]) for n in firsts], context)
        self.input_size, size = varied.input_size, depth * varied.input_size
        if size:
            self.embed_tokens_per_layer = ScaledEmbedding(
                varied.input_size**0.5, config.vocab_size, size, context=context
            )
            self.per_layer_model_projection = replicated_linear(
                "model.per_layer_model_projection", hidden, size, context
            )
            sizes = replace(config, hidden_size=varied.input_size)
            self.per_layer_projection_norm = make_norm(sizes, context)
            self.projection_scale = hidden**-0.5
        self.backend, self.first_shared = context.kernels.attention, depth - varied.num_kv_shared
        self.layers = nn.ModuleList()
        last: dict[int | None, Gemma4Attention] = {}
        for index, window in enumerate(config.sliding_windows):
            shared = last[window] if index >= self.first_shared else None
            layer = Gemma4Layer(index, kinds.index(window), configs[index], shared, context)
            self.layers.append(layer)
            if shared is None:
                last[window] = layer.mixer
        self.stack = list(self.layers)
        self.norm = make_norm(config, context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed_tokens(batch.token_ids)
        inputs = self._inputs(x, batch.token_ids) if self.input_size else None
        rotations, index = self.rotary(batch.positions), 0
        for layer in self.stack:
            if index == self.first_shared and _has_others(batch):
                kept = batch.logits_indices
                if not len(kept):  # the step has only chunks of prompts
                    return x[:0]
                batch = ends_of(batch, self.backend)
                x, inputs = x[kept], None if inputs is None else inputs[kept]
                rotations = self.rotary(batch.positions)
            index += layer.depth
            rows = batch.logits_indices if index == len(self.layers) else None
            x = layer(x, rotations, batch, rows, inputs)
        return self.norm(x, None)[0]

    def _inputs(self, embedded: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Computes the per-layer inputs of each token: [T, layers, input size]."""
        shape = len(token_ids), -1, self.input_size
        projected = self.per_layer_model_projection(embedded) * self.projection_scale
        normed, _ = self.per_layer_projection_norm(projected.view(-1, self.input_size), None)
        return (normed.view(shape) + self.embed_tokens_per_layer(token_ids).view(shape)) * 2**-0.5


def _has_others(batch: Batch) -> bool:
    """Whether some tokens give no logits."""
    wanted = batch.logits_indices
    return wanted is not None and len(wanted) < batch.num_tokens


def ends_of(batch: Batch, backend: AttentionBackend) -> Batch:
    """Makes a batch of the tokens that give logits, each as its own sequence, without reading
    values on the host.

    Why: layers that store no keys and values need no other token; most prompts are left with one.
    """
    wanted = batch.logits_indices
    assert wanted is not None
    starts, count = batch.query_start_loc[1:], len(wanted)
    of_seqs = torch.searchsorted(starts, wanted.to(starts.dtype), right=True)
    positions = batch.positions[wanted]
    found = replace(
        batch,
        token_ids=batch.token_ids[wanted],
        positions=positions,
        slot_mapping=batch.slot_mapping[:, wanted],
        query_start_loc=torch.arange(count + 1, dtype=starts.dtype, device=starts.device),
        seq_lens=(positions + 1).to(batch.seq_lens.dtype),
        block_tables=batch.block_tables[:, of_seqs],
        logits_indices=None,
        num_decodes=count,
        max_query_len=1,
    )
    found.attention = backend.prepare(found)
    return found


class Gemma4Layer(GenericLayer):
    """One layer; `shared` is the attention that provides keys and values, None if it has its own.

    Attributes:
        depth: how many layers it counts as.
    """

    depth = 1

    def __init__(
        self,
        index: int,
        rotation: int,
        config: ModelConfig,
        shared: Gemma4Attention | None,
        context: ModelContext,
    ) -> None:
        Layer.__init__(self)
        path, plan, moe = f"model.layers.{index}", config.plan, config.moe
        varied, hidden = plan.gemma4, config.hidden_size
        assert varied is not None
        self.index, self.rotation, self.scale = index, rotation, plan.residual_multiplier
        self.self_attn = self.mixer = Gemma4Attention(
            f"{path}.self_attn", index, config, shared, context
        )
        self.mlp = make_mlp(f"{path}.mlp", index, replace(config, moe=None), context)
        self.experts = None
        norms = "input_layernorm", "attention_output_norm", "post_attention_layernorm"
        norms += ("mlp_output_norm",)
        if moe is not None:
            self.router = ScaledRouter(f"{path}.router", hidden, moe, config, context)
            self.experts = Experts(f"{path}.experts", hidden, moe, plan.hidden_act, context=context)
            self.routed: Callable[..., torch.Tensor] = self._one_by_one
            norms += "post_mlp_norm", "post_experts_norm", "pre_experts_norm"
        self.activation = ACTIVATIONS[plan.hidden_act]
        if varied.input_size:
            self.per_layer_input_gate = replicated_linear(
                f"{path}.per_layer_input_gate", hidden, varied.input_size, context
            )
            self.per_layer_projection = replicated_linear(
                f"{path}.per_layer_projection", varied.input_size, hidden, context
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
        """As `SparseMLP.graph_safe`, if there are experts."""
        return self.experts is None or getattr(self.routed, "graph_safe", False)

    def forward(
        self,
        x: torch.Tensor,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] -> the same for the rows that continue after attention.

        Args:
            inputs: the per-layer inputs of all layers, [T, layers, input size].
        """
        normed, x = self.input_layernorm(x, None)
        attended = self.mixer(normed, rotations[self.rotation], batch, rows)
        attended = self._added(self.attention_output_norm, attended)
        normed, x = self.post_attention_layernorm(attended, select_rows(x, rows))
        x = x + self._mlps(normed, x)
        if inputs is not None:
            own = select_rows(inputs[:, self.index], rows)
            gated = self.activation(self.per_layer_input_gate(x)) * own
            x = x + self._added(self.post_per_layer_input_norm, self.per_layer_projection(gated))
        return x * self.layer_scalar

    def _mlps(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns what the MLP adds to x, including the experts in parallel with it."""
        if self.experts is None:
            return self.mlp_part(normed)
        dense = self._added(self.post_mlp_norm, self.mlp(normed))
        sparse = self.routed(self._added(self.pre_experts_norm, x), x)
        both = dense + self._added(self.post_experts_norm, sparse)
        return self._added(self.mlp_output_norm, both)

    @property
    def gate(self) -> ScaledRouter:
        """The router, under the name that it has in a `SparseMLP`."""
        return self.router

    def _one_by_one(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.router(seen))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return full_slots(path, layer_scalar=self.layer_scalar)


class Gemma4Attention(GenericAttention):
    """Attention with normed values; the norm has no weight, and values may be the projected keys.

    Attributes:
        attention: the layer's own, or the one of the layer whose keys and values it uses.
    """

    def __init__(
        self,
        path: str,
        index: int,
        config: ModelConfig,
        shared: Gemma4Attention | None,
        context: ModelContext,
    ) -> None:
        varied = config.plan.gemma4
        assert varied is not None
        # Why before the base class: it makes projections and norms that depend on these.
        self.is_shared, self.eps = shared is not None, config.rms_norm_eps
        self.keys_are_values = varied.keys_are_values and config.sliding_windows[index] is None
        super().__init__(path, index, config, context)
        spec = self.attention.spec
        self.counts = spec.num_heads, spec.num_kv_heads
        if shared is not None:
            self.attention = shared.attention

    def make_qkv(self, path: str, config: ModelConfig, context: ModelContext) -> MergedLinear:
        shard, kv_heads = context.shard, config.num_key_value_heads
        parts = {"q_proj": config.num_attention_heads * config.head_dim}
        if not self.is_shared:
            parts["k_proj"] = kv_heads * config.head_dim
        if not self.is_shared and not self.keys_are_values:
            parts["v_proj"] = kv_heads * config.head_dim
        shards = dict.fromkeys(parts, shard.of_heads(kv_heads)) | {"q_proj": shard}
        return MergedLinear(
            path, config.hidden_size, parts, bias=config.plan.qkv_bias, context=context,
            shards=shards,
        )  # fmt: skip

    def make_norm(
        self, spec: AttentionSpec, config: ModelConfig, context: ModelContext
    ) -> ReorderedHeadNorm:
        return (QueryNorm if self.is_shared else ReorderedHeadNorm)(spec, config, context)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        attention, norm = self.attention, self.head_norm.weights
        if self.is_shared:
            q = rotate(heads, rotation, norm)
            attended = attention.backend.attend(q, attention.cache, batch)
        else:
            values = F.rms_norm(heads[:, -self.counts[1] :], (self.head_dim,), None, self.eps)
            kept = heads if self.keys_are_values else heads[:, : sum(self.counts)]
            attended = attention(torch.cat((kept, values), dim=1), rotation, norm, batch)
        return self.o_proj(select_rows(attended, rows).flatten(1))


class QueryNorm(ReorderedHeadNorm):
    """The norm of query heads only."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(replace(spec, num_kv_heads=0), config, context)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots = super().weight_slots(path).items()
        return {name: slot for name, slot in slots if name.endswith("q_norm.weight")}
