"""The decoder that all families share; `LayerPlan` says what theirs differs in.

    token_ids ─ embed_tokens ─┐
      per layer:              ├─ input_layernorm ─ self_attn ─────────┐
                     residual └────────────────────────────────────── + ┐
                              ┌─────────────────────────────────────────┘
                              ├─ post_attention_layernorm ─ mlp ──────┐
                     residual └────────────────────────────────────── + ┐
      norm ─ lm_head ─ logits ──────────────────────────────────────────┘

That is Llama. Other families have norms behind attention and MLP too, or only there, or one norm
before both.

T tokens go in and L rows come out: in the last layer only rows that give logits go on from
attention, since behind it no row looks at another.

Module names are Llama's, so weights find their place by name; `ModelConfig.tensor_names` has what a
family calls otherwise. Called by the runner; knows neither blocks nor sampling.

Legend: T tokens, L rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanoengine.attention.batch import Batch
from nanoengine.attention.rotate import Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.kernels import Masks
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.norm import LayerNorm, RMSNorm, make_norm
from nanoengine.layers.rotary import RotaryEmbedding
from nanoengine.models.attention import SelfAttention, taken
from nanoengine.models.mlp import GatedMLP, PlainMLP
from nanoengine.models.states import STATE_LAYERS, StateLayer

Norm = RMSNorm | LayerNorm | None
Layers = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A layer, or several: called as `DecoderLayer.forward`."""


def model_norm(config: ModelConfig, context: ModelContext) -> RMSNorm | LayerNorm:
    """A norm over the hidden size, of the family's kind."""
    plan = config.plan
    return make_norm(
        plan.norm, config.hidden_size, config.rms_norm_eps, bias=plan.norm_bias, context=context
    )


class DecoderLayer(Layer):
    """One layer. The residual travels beside x, so that each norm can take the sum in one go.

    Attributes:
        mixer: where rows look at others: attention, or what keeps a state in place of it.
    """

    def __init__(
        self,
        mixer: SelfAttention | StateLayer,
        mlp: nn.Module,
        config: ModelConfig,
        context: ModelContext,
    ) -> None:
        super().__init__()
        setattr(self, mixer.name, mixer)  # as checkpoints call it
        self.mixer, self.mlp = mixer, mlp
        norms, self.scale = config.plan.norms, config.plan.residual_scale
        self.is_parallel = norms == "parallel"
        before, behind = norms != "behind", norms in ("behind", "both")

        def norm(wanted: bool) -> Norm:
            return model_norm(config, context) if wanted else None

        self.input_layernorm = norm(before)
        self.attention_output_norm = norm(behind)
        self.post_attention_layernorm = norm(before and not self.is_parallel)
        self.mlp_output_norm = norm(behind)

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
        x, residual = summed(self.input_layernorm, x, residual)
        attended = self.mixer(x, rotation, batch, rows)
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
        x = x if norm is None else norm(x)
        return x if self.scale == 1 else x * self.scale


def summed(
    norm: Norm, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x + residual, x + residual); no norm: the sum twice; no residual: x alone."""
    if norm is None:
        total = x if residual is None else x + residual
        return total, total
    return (norm(x), x) if residual is None else norm(x, residual)


def make_mixer(
    path: str, layer: int, config: ModelConfig, context: ModelContext
) -> SelfAttention | StateLayer:
    """What layer `layer`, whose full name is `path`, has where others have attention."""
    states = config.states
    if states is not None and layer in states.layers:
        kind = STATE_LAYERS[states.kind]
        return kind(f"{path}.{kind.name}", config, context)
    return SelfAttention(f"{path}.{SelfAttention.name}", layer, config, context)


def make_mlp(path: str, layer: int, config: ModelConfig, context: ModelContext) -> Layer:
    """The MLP of layer `layer`, whose full name is `path`: [T, hidden_size] -> the same."""
    if config.moe is not None and layer in config.moe.layers:
        from nanoengine.models.moe import SparseMLP

        return SparseMLP(path, config, context)
    kind = GatedMLP if config.plan.gated else PlainMLP
    return kind(path, config.intermediate_size, config, context)


class Decoder(Layer):
    """The stack of layers between token ids and the last norm.

    Attributes:
        stack: what runs, each with its kind of rotation: `plain_stack`, or what `Kernels.fuse`
            made of it.
    """

    def __init__(
        self, layers: list[DecoderLayer], config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, context=context)
        # Why rounded: Gemma's own code keeps the factor in the model's dtype.
        self.scale = torch.tensor(config.plan.embedding_scale).to(context.dtype).item()
        kinds = list(dict.fromkeys(config.ropes))
        self.rotaries = nn.ModuleList(
            RotaryEmbedding(
                rope,
                config.head_dim,
                config.max_position_embeddings,
                rotary_dim=config.plan.rotary_dim,
                context=context,
            )
            for rope in kinds
        )
        self.kind_of_layer = [kinds.index(rope) for rope in config.ropes]
        self.layers = nn.ModuleList(layers)
        self.stack = self.plain_stack()
        self.norm = model_norm(config, context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x, residual = self.embed(batch.token_ids), None
        rotations = [rotary(batch.positions) for rotary in self.rotaries]
        for i, (kind, layers) in enumerate(self.stack, 1):
            rows = batch.logits_indices if i == len(self.stack) else None
            x, residual = layers(x, residual, rotations[kind], batch, rows)
        x, _ = self.norm(x, residual)
        return x

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]."""
        x = self.embed_tokens(token_ids)
        return x if self.scale == 1 else x * self.scale

    def plain_stack(self) -> list[tuple[int, Layers]]:
        """Each layer by itself."""
        return list(zip(self.kind_of_layer, self.layers, strict=True))


class CausalLM(Layer):
    """A language model of any family, on one rank.

    Parameters are uninitialised until `load_model` fills them.

    Raises:
        ConfigError: the ranks don't divide the heads, the MLP or the vocabulary.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.config = config
        self.check_ranks(config, context.shard.world_size)
        layers = [
            DecoderLayer(
                make_mixer(f"model.layers.{layer}", layer, config, context),
                make_mlp(f"model.layers.{layer}.mlp", layer, config, context),
                config,
                context,
            )
            for layer in range(config.num_hidden_layers)
        ]
        self.model = Decoder(layers, config, context)
        self.lm_head = OutputHead(
            "lm_head", self.model.embed_tokens, tied=config.tie_word_embeddings, context=context
        )

    @property
    def graph_safe(self) -> bool:
        """A forward decides nothing on the host, so it may be captured in a CUDA graph."""
        mlps = [layer.mlp for layer in self.model.layers]
        # Why not states: the host looks for their slots.
        return self.config.states is None and all(getattr(mlp, "graph_safe", True) for mlp in mlps)

    @staticmethod
    def check_ranks(config: ModelConfig, ranks: int) -> None:
        """Raises ConfigError unless each rank gets a part of the same size of all that is split; KV
        heads may also be fewer than ranks, which share them then."""
        sizes = {
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "moe_intermediate_size": config.moe.intermediate_size if config.moe else 0,
            "shared_expert_intermediate_size": config.moe.shared_size if config.moe else 0,
            "linear_num_key_heads": config.states.num_key_heads if config.states else 0,
            "hidden_size": config.states.channels if config.states else 0,
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

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the rows of a step that give logits, [L, hidden_size]."""
        return self.model(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] -> [L, vocab_size]."""
        return self._capped(self.lm_head(self._scaled(hidden)))

    def most_likely(
        self, hidden: torch.Tensor, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest of each row's logits without all of them, where that can be: token ids [L]
        and their logits [L]; None: ask for `logits`. `masks`: see `LinearMethod.argmax`."""
        softcap = self.config.plan.logit_softcap
        found = self.lm_head.argmax(self._scaled(hidden), softcap, masks)
        return None if found is None else (found[0], self._capped(found[1]))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.plan.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Why the hidden states, and not the logits: they are fewer."""
        scale = self.config.plan.logit_scale
        return hidden if scale == 1 else hidden * scale

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention layers in order, for the runner to bind the KV cache to."""
        mixers = [layer.mixer for layer in self.model.layers]
        return [mixer.attention for mixer in mixers if isinstance(mixer, SelfAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The layers that keep states, in order."""
        mixers = [layer.mixer for layer in self.model.layers]
        return [mixer for mixer in mixers if isinstance(mixer, StateLayer)]
