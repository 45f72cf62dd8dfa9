"""CausalLM: Llama and Qwen3 from token ids to logits, top to bottom in this file.

    token_ids ─ embed_tokens ─┐
      per layer:              ├─ input_layernorm ─ self_attn ─────────┐
                     residual └────────────────────────────────────── + ┐
                              ┌─────────────────────────────────────────┘
                              ├─ post_attention_layernorm ─ mlp ──────┐
                     residual └────────────────────────────────────── + ┐
      norm ─ lm_head ─ logits ──────────────────────────────────────────┘

The input has T tokens. The output is the hidden states of the L tokens for which logits are needed:
only these continue after attention in the last layer, because nothing later reads the others.

Modules have the names of the checkpoint's tensors, so each weight is found under its own name. The
runner calls the model. The model does not depend on blocks or sampling.

Other families replace parts of this file by classes in `generic.py`, `moe.py` and
`linear_attention.py`; `loader.py` selects them by the config.

Legend: T tokens, L tokens with logits, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from nanoengine.attention.base import AttentionSpec, HeadNormWeights, Rotation
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.kernels import Masks
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear, RowParallelLinear
from nanoengine.layers.norm import HeadNorm, RMSNorm
from nanoengine.layers.rotary import RotaryEmbedding

LayerCall = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Computes one layer or several fused layers, with the signature of `DecoderLayer.forward`."""


class CausalLM(Layer):
    """A language model on one rank. Parameters are uninitialised until `load_model` fills them.

    Attributes:
        graph_safe: the forward pass makes no decision on the host, so a CUDA graph can capture it.
        recurrent_layers: linear-attention and SSM layers, which keep a state of fixed size instead
            of keys and values.
        key_factors: per layer, factors that make keys easier to quantize to int8; empty without an
            int8 KV cache (`key_factors.py`).
    """

    graph_safe = True
    recurrent_layers: Sequence[Layer] = ()
    key_factors: Sequence[HeadNormWeights] = ()

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, context)
        self.lm_head = OutputHead(
            "lm_head", self.model.embed_tokens, tied=config.tie_word_embeddings, context=context
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the hidden states of the tokens with logits, [L, hidden_size]."""
        return self.model(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self.lm_head(hidden)

    def most_likely(
        self, hidden: torch.Tensor, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Finds the largest logit of each row without computing all logits.

        Args:
            masks: see `LinearMethod.argmax`.

        Returns:
            Token ids [L] and their logits [L]; None if this head does not support it: call `logits`
            instead.
        """
        return self.lm_head.argmax(hidden, masks)

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention layers in order; the runner binds the KV cache to them."""
        return [module for module in self.modules() if isinstance(module, Attention)]


class Decoder(Layer):
    """Embedding, layers and last norm.

    Attributes:
        executed_layers: `layers`, or the fused layers by which `Kernels.fuse` has replaced them.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, context=context)
        self.rotary = RotaryEmbedding(config.ropes[0], config, context)
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, context) for index in range(config.num_hidden_layers)
        )
        self.executed_layers: list[LayerCall] = list(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x, rotation = self.embed_tokens(batch.token_ids), self.rotary(batch.positions)
        return self.forward_layers(x, rotation, batch)

    def forward_layers(self, x: torch.Tensor, rotation: Rotation, batch: Batch) -> torch.Tensor:
        """Embeddings [T, hidden_size] -> hidden states of the tokens with logits, after the
        norm."""
        residual = None
        for layers in self.executed_layers:
            rows = batch.logits_indices if layers is self.executed_layers[-1] else None
            x, residual = layers(x, residual, rotation, batch, rows)
        return self.norm(x, residual)[0]


class DecoderLayer(Layer):
    """One layer. The residual is passed with x; each norm adds x to it and normalizes the sum."""

    def __init__(self, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        path, norm = f"model.layers.{index}", (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(*norm, context=context)
        self.self_attn = SelfAttention(f"{path}.self_attn", index, config, context)
        self.post_attention_layernorm = RMSNorm(*norm, context=context)
        self.mlp = GatedMLP(f"{path}.mlp", config.intermediate_size, config, context)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one layer.

        Args:
            x, residual: the output of the preceding layer, and the residual to add it to.
            rows: indices of the tokens that continue after attention, [L]; None: all.

        Returns:
            The same pair for the next layer.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, batch, rows)
        x, residual = self.post_attention_layernorm(x, select_rows(residual, rows))
        return self.mlp(x), residual


def select_rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Selects rows [L] of x [T, ...]; None: returns x itself."""
    return x if rows is None else x.index_select(0, rows)


class SelfAttention(Layer):
    """QKV projection, QK norm if the model has one, RoPE, attention, and output projection."""

    def __init__(self, path: str, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.head_dim, inner = config.head_dim, config.num_attention_heads * config.head_dim
        bias = config.plan.output_bias
        self.qkv_proj = self.make_qkv(f"{path}.qkv_proj", config, context)
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj", inner, config.hidden_size, bias=bias, context=context
        )
        spec = self.make_spec(index, config, context)
        self.norm_weights: HeadNormWeights | None = None
        if config.plan.qk_norm is not None:
            self.head_norm = self.make_norm(spec, config, context)
            self.norm_weights = self.head_norm.weights
        self.attention = Attention(spec, context.kernels.attention)

    def make_qkv(self, path: str, config: ModelConfig, context: ModelContext) -> QKVLinear:
        """Makes the QKV projection."""
        return QKVLinear(path, config, context)

    def make_spec(self, index: int, config: ModelConfig, context: ModelContext) -> AttentionSpec:
        """Returns the heads, scale and window of the layer's attention on this rank."""
        kv_heads = config.num_key_value_heads
        return AttentionSpec(
            num_heads=context.shard.split(config.num_attention_heads),
            num_kv_heads=context.shard.for_kv_heads(kv_heads).split(kv_heads),
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[index],
        )

    def make_norm(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> Layer:
        """Makes the QK norm."""
        return HeadNorm(spec, config.rms_norm_eps, context=context)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Stores all tokens' keys and values and attends; returns the outputs of `rows` only."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D]
        attended = self.attention(heads, rotation, self.norm_weights, batch)  # [T, H, D]
        return self.o_proj(select_rows(attended, rows).flatten(1))


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)); `size` is the intermediate size.

    Attributes:
        gate_up_class: the class of the linear layer that computes gate and up.
    """

    gate_up_class = MergedLinear

    def __init__(self, path: str, size: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden = config.plan, config.hidden_size
        self.activation, self.kernels = plan.hidden_act, context.kernels
        self.gate_up_proj = self.gate_up_class(
            f"{path}.gate_up_proj",
            hidden,
            {"gate_proj": size, "up_proj": size},
            bias=plan.mlp_bias,
            context=context,
        )
        self.down_proj = RowParallelLinear(
            f"{path}.down_proj", size, hidden, bias=plan.mlp_bias, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.kernels.gate(self.gate_up_proj(x), self.activation))
