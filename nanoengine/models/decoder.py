"""The decoder that all families share.

    token_ids ─ embed_tokens ─┐
      per layer:              ├─ input_layernorm ─ self_attn ─────────┐
                     residual └────────────────────────────────────── + ┐
                              ┌─────────────────────────────────────────┘
                              ├─ post_attention_layernorm ─ mlp ──────┐
                     residual └────────────────────────────────────── + ┐
      norm ─ lm_head ─ logits ──────────────────────────────────────────┘

T tokens go in and L rows come out: in the last layer only rows that give logits go on from
attention, since behind it no row looks at another.

A family is a subclass of `CausalLM` that says which attention and which MLP a layer has. Module
names are the checkpoint's, so weights find their place by name. Called by the runner; knows neither
blocks nor sampling.

Legend: T tokens, L rows of logits, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from nanoengine.attention.base import AttentionSpec
from nanoengine.attention.rotate import Rotation
from nanoengine.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.layers.attention import Attention
from nanoengine.layers.context import ModelContext
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.layer import Layer
from nanoengine.layers.linear import MergedLinear, QKVLinear, RowParallelLinear
from nanoengine.layers.norm import HeadNorm, RMSNorm
from nanoengine.layers.rotary import RotaryEmbedding


def taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows [L] of x [T, ...]; None: all of them, without a copy."""
    return x if rows is None else x.index_select(0, rows)


class SelfAttention(Layer):
    """Projects to heads, norms them where the family does, rotates, attends, projects back."""

    def __init__(
        self,
        path: str,
        layer: int,
        config: ModelConfig,
        context: ModelContext,
        *,
        qkv_bias: bool,
        output_bias: bool,
        head_norm: bool,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVLinear(
            f"{path}.qkv_proj",
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=qkv_bias,
            context=context,
        )
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj",
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=output_bias,
            context=context,
        )
        self.num_heads = context.shard.split(config.num_attention_heads)
        num_kv_heads = config.num_key_value_heads
        self.num_kv_heads = context.shard.of_heads(num_kv_heads).split(num_kv_heads)
        self.head_norm = (
            HeadNorm(
                self.num_heads,
                self.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                context=context,
            )
            if head_norm
            else None
        )
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            sliding_window=config.sliding_windows[layer],
        )
        self.attention = Attention(spec, context.attention_backend)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All rows store keys and values and attend; those that `rows` names come out."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2 K, D]
        norm = None if self.head_norm is None else self.head_norm.weights
        attended = taken(self.attention(heads, rotation, norm, batch), rows)
        return self.o_proj(attended.flatten(1))


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), with the `act` that the config names."""

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation, self.ops = config.hidden_act, context.ops
        self.gate_up_proj = MergedLinear(
            f"{path}.gate_up_proj",
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            context=context,
        )
        self.down_proj = RowParallelLinear(f"{path}.down_proj", inner, hidden, context=context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self.activation, self.ops))


class DecoderLayer(Layer):
    """One layer. The residual travels beside x, so that each norm can take the sum in one go."""

    def __init__(
        self, self_attn: SelfAttention, mlp: nn.Module, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm = RMSNorm(size, eps, context=context)
        self.post_attention_layernorm = RMSNorm(size, eps, context=context)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the layer before added, the residual before it) -> the same pair of this layer,
        for the rows that go on from attention; None: all of them."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, batch, rows)
        x, residual = self.post_attention_layernorm(x, taken(residual, rows))
        return self.mlp(x), residual


class Decoder(Layer):
    """The stack of layers between token ids and the last norm.

    Attributes:
        stack: what runs as each layer: the layer itself, or what `fuse_layers` put in its place.
    """

    def __init__(
        self, layers: list[DecoderLayer], config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, context=context)
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, context=context
        )
        self.layers = nn.ModuleList(layers)
        self.stack: list[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = list(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x, residual, last = self.embed(batch.token_ids), None, self.stack[-1]
        for layer, rotation in zip(self.stack, self.rotations(batch.positions), strict=True):
            rows = batch.logits_indices if layer is last else None
            x, residual = layer(x, residual, rotation, batch, rows)
        x, _ = self.norm(x, residual)
        return x

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]."""
        return self.embed_tokens(token_ids)

    def rotations(self, positions: torch.Tensor) -> list[Rotation]:
        """How each layer turns its heads."""
        return [self.rotary(positions)] * len(self.layers)


class CausalLM(Layer, ABC):
    """A language model of one family, on one rank. Subclasses implement the two `make_` methods.

    Parameters are uninitialised until `load_weights` or `dummy_weights` fills them.

    Attributes:
        graph_safe: a forward decides nothing on the host, so it may be captured in a CUDA graph.
        layer_class, decoder_class: what a family with other norms or another frame replaces.

    Raises:
        ConfigError: the ranks don't divide the heads, the MLP or the vocabulary.
    """

    graph_safe: ClassVar[bool] = True
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    decoder_class: ClassVar[type[Decoder]] = Decoder

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.config = config
        self.check_ranks(config, context.shard.world_size)
        layers = [
            self.layer_class(
                self.make_attention(f"model.layers.{layer}.self_attn", layer, config, context),
                self.make_mlp(f"model.layers.{layer}.mlp", layer, config, context),
                config,
                context,
            )
            for layer in range(config.num_hidden_layers)
        ]
        self.model = self.decoder_class(layers, config, context)
        self.lm_head = OutputHead(
            "lm_head", self.model.embed_tokens, tied=config.tie_word_embeddings, context=context
        )

    @staticmethod
    def check_ranks(config: ModelConfig, ranks: int) -> None:
        """Raises ConfigError unless each rank gets a part of the same size of all that is split; KV
        heads may also be fewer than ranks, which share them then."""
        sizes = {
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "moe_intermediate_size": config.moe.intermediate_size if config.moe else 0,
        }
        for name, size in sizes.items():
            if size % ranks:
                raise ConfigError(f"tensor_parallel_size={ranks} must divide {name}={size}")
        kv_heads = config.num_key_value_heads
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size={ranks} must divide num_key_value_heads={kv_heads}, or be a"
                " multiple of it"
            )

    @abstractmethod
    def make_attention(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> SelfAttention:
        """The attention of layer `layer`, whose full name is `path`."""

    def make_mlp(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> nn.Module:
        """The MLP of layer `layer`: [T, hidden_size] -> [T, hidden_size]."""
        return GatedMLP(path, config, context)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the rows of a step that give logits, [L, hidden_size]."""
        return self.model(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self.lm_head(hidden)

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest of each row's logits without all of them, where that can be: token ids [L]
        and their logits [L]; None: ask for `logits`."""
        return self.lm_head.argmax(hidden)

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention layers in order, for the runner to bind the KV cache to."""
        return [layer.self_attn.attention for layer in self.model.layers]
