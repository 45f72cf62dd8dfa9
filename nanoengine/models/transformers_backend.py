"""TransformersLM: a decoder whose modules are transformers', with attention over the paged cache.

    token_ids ─► transformers' modules ─► logits
                  │        └── AttentionInterface ──► paged_attention ──► AttentionBackend
                  └── nn.Linear ──► LinearMethod (packed, int8, int4)

It serves every architecture that has no native model, if its attention goes through
transformers' `AttentionInterface` and nothing else depends on other tokens. `check` tests this for
each model when it is loaded: transformers' own attention must give the same logits as attention
over cached keys and values, in one step and in two. Called by `loader.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from nanoengine.attention.base import AttentionSpec
from nanoengine.attention.batch import Batch
from nanoengine.attention.naive import NaiveBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.files import stored_tensors
from nanoengine.checkpoint.gguf import FLOATS
from nanoengine.checkpoint.gguf_tensors import GGUFModel
from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.checkpoint.transformers_config import text_config
from nanoengine.checkpoint.weights import load_weights, tensors_to_run
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from nanoengine.layers.attention import Attention
from nanoengine.layers.kernels import GATES, LinearMethod
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.moe import Experts
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import accept_blocks
from nanoengine.settings.checks import truncate
from nanoengine.settings.files import is_gguf

INTERFACE = "nanoengine"
ROUTERS = ("gate", "router", "classifier", "wg")
"""Last parts of the names of linear layers that are not swapped. Why: a router with rounded
weights would choose other experts."""
TEXT_PART_NAMES = {r"^(model\.)?(language_model|text_model)\.(model\.)?": "model."}
"""Prefix of tensors in a multimodal checkpoint -> in its text part."""
PROBE_TOKENS, PROBE_SPLIT, PROBE_WINDOW = 9, 5, 4


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] ->
    [1, T, H, D]. The other arguments are transformers' own."""
    size = value.shape[3]  # Why padded: with MLA values are smaller than keys.
    value = F.pad(value, (0, query.shape[3] - size))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    model: TransformersLM = vars(module)["model_of_step"]
    if model.batch is not None:
        paged: Attention = vars(module)["paged"]
        attended = paged.backend.forward(q, k, v, paged.cache, model.batch)
        return attended[None, ..., :size], None
    spec = AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=q.shape[2] ** -0.5 if scaling is None else float(scaling),
        sliding_window=model.windows[len(model.calls) % len(model.windows)],
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return model.attend_probe(module, spec, q, k, v)[None, ..., :size].contiguous(), None


AttentionInterface.register(INTERFACE, paged_attention)


class SwappedLinear(Layer):
    """An nn.Linear whose weight a LinearMethod stores and multiplies."""

    def __init__(self, method: LinearMethod, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.method, self.bias = method, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x.flatten(0, -2), self.bias).unflatten(0, x.shape[:-1])


class SwappedEmbedding(Layer):
    """An nn.Embedding whose rows a LinearMethod stores."""

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        super().__init__()
        self.method, self.dtype = method, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.method.rows(ids.flatten()).to(self.dtype).unflatten(0, ids.shape)


class SwappedExperts(Experts):
    """A stack of experts of transformers, whose matrices are LinearMethods."""

    def __init__(
        self, path: str, module: nn.Module, activation: str, context: ModelContext
    ) -> None:
        count, hidden, inner = module.down_proj.shape
        moe = MoEConfig(
            num_experts=count, num_experts_per_tok=1, intermediate_size=inner, layers=()
        )
        super().__init__(path, hidden, moe, activation, context=context)

    def forward(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """transformers passes ids before weights."""
        return super().forward(hidden, weights, experts)


def gate_of(module: nn.Module) -> str | None:
    """The gate of a stack of experts, a key of `GATES`. None: it is not such a stack, or its
    computation has no counterpart here."""
    layout = ("has_gate", True), ("is_concatenated", True), ("is_transposed", False)
    layout += ("has_bias", False), ("has_post_expert_norm", False)
    if any(getattr(module, name, None) is not value for name, value in layout):
        return None
    x = torch.linspace(-9, 9, 64)
    gated = module._apply_gate(x)
    equal = (k for k, gate in GATES.items() if torch.allclose(gate(*x.clone().chunk(2)), gated))
    return next(equal, None)


def parameter_slot(name: str, tensor: torch.Tensor, offset: float) -> WeightSlot:
    """The slot of a parameter, from which `offset` is subtracted. A GGUF file has stacks of experts
    as one matrix per expert."""

    def slot(part: torch.Tensor) -> WeightSlot:
        return WeightSlot(shape=tuple(part.shape), store=lambda rows: part.copy_(rows - offset))

    path, _, last = name.rpartition(".")
    if not path.endswith(".experts"):
        return slot(tensor)
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    pieces = {
        f"{path}.{expert}.{part}.weight": slot(rows)
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }
    return replace(slot(tensor), pieces=pieces, pieces_only=True)


class BodyOutput(BaseModelOutput):
    """Hidden states; every other output of a body is None."""

    def __getattr__(self, name: str) -> None:
        return None


class Hidden(nn.Module):
    """Replaces the base model (the body) while the head runs: returns known hidden states."""

    states: torch.Tensor

    def forward(self, *_: object, **__: object) -> BodyOutput:
        return BodyOutput(last_hidden_state=self.states[None])

    @property
    def decoder(self) -> Hidden:
        """OPT's heads call the body's decoder."""
        return self


class TransformersLM(Layer):
    """A language model on one rank; see the module. It has `CausalLM`'s interface.

    Attributes:
        batch: the engine's step; None: a probe, whose keys and values are kept in `past`.
        calls: the probe's attention calls in order: (module, spec).
        windows: per layer its sliding window in the probe, or None.

    Raises:
        UnsupportedModelError: the modules fail, or need more than the KV cache; says which.
    """

    graph_safe, recurrent_layers, key_factors = False, (), ()

    def __init__(
        self, config: ModelConfig, directory: Path, context: ModelContext, *, dummy: bool
    ) -> None:
        super().__init__()
        self.config, self.hidden = config, Hidden()
        self.batch: Batch | None = None
        self.windows = [window and PROBE_WINDOW for window in config.sliding_windows]
        # Why float32 or wider: rounding to 16 bits would hide what the probe looks for.
        dtype = torch.promote_types(context.stored_dtype, torch.float32)
        options = {"dtype": dtype, "attn_implementation": INTERFACE}
        try:
            source = text_config(directory)
            from_file = is_gguf(directory) and not dummy
            if from_file:
                with no_init_weights():
                    self.whole = AutoModelForCausalLM.from_config(source, **options)
            elif dummy:
                self.whole = AutoModelForCausalLM.from_config(source, **options)
            else:
                options |= {"config": source, "key_mapping": TEXT_PART_NAMES}
                self.whole = AutoModelForCausalLM.from_pretrained(directory, **options)
            self.whole.eval().requires_grad_(False).to(context.device)
            for module in self.whole.modules():
                vars(module)["model_of_step"] = self
            if from_file:
                self.load_gguf(directory, context)
            self.whole.set_experts_implementation("eager")  # which supports every size and dtype
            own_config = self.whole.config.get_text_config(decoder=True)
            window = getattr(own_config, "sliding_window", None)
            if any(self.windows):  # Why: masks read the window in each forward.
                own_config.sliding_window = PROBE_WINDOW
            quantized = [m for m in self.whole.modules() if isinstance(m, QuantizedLinear)]
            kinds = [method.activations for method in quantized]
            for method in quantized:  # Why: rounding would hide what the probe looks for.
                method.set_activations("float")
            self.check(*self.probe(context.device))
            for method, kind in zip(quantized, kinds, strict=True):
                method.set_activations(kind)
            own_config.sliding_window = window
            self.swap_linears(context)
            self.whole.to(context.dtype)
            calls, self.calls, self.past = self.calls, [], {}
            # Fails if a module reads a swapped weight.
            self.logits(self.body(*torch.zeros(2, 1, dtype=torch.long, device=context.device)))
        except WeightLoadError:
            raise
        except Exception as error:  # transformers' modules raise anything
            # Why: the modules of Falcon look the name up in a table of their own.
            is_unknown = isinstance(error, KeyError) and error.args == (INTERFACE,)
            reason = "its attention has an interface of its own" if is_unknown else truncate(error)
            raise UnsupportedModelError(
                f"{config.architecture} cannot run in transformers' modules: {reason}"
            ) from error
        self.attention_layers = [
            Attention(replace(spec, sliding_window=window), context.kernels.attention)
            for (_, spec), window in zip(calls, config.sliding_windows, strict=True)
        ]
        for (module, _), attention in zip(calls, self.attention_layers, strict=True):
            vars(module)["paged"] = attention
        self.calls, self.past = [], {}

    def swap_linears(self, context: ModelContext) -> None:
        """Replaces the body's linear layers and experts by this engine's. The head stays: it may be
        tied."""
        for path, module in list(self.whole.base_model.named_modules()):
            if (activation := gate_of(module)) is None:
                continue
            swapped = SwappedExperts(path, module, activation, context)
            for name, slot in swapped.weight_slots(path).items():
                slot.store(getattr(module, name.rpartition(".")[2]).detach())
            self.whole.base_model.set_submodule(path, swapped)
        for path, parent in list(self.whole.base_model.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) not in (nn.Linear, Conv1D) or name.endswith(ROUTERS):
                    continue
                weight = child.weight if type(child) is nn.Linear else child.weight.T
                method = context.kernels.linear(f"{path}.{name}")
                method.create(tuple(weight.shape), context.stored_dtype, context.device)
                method.load(weight.detach().contiguous())
                bias = None if child.bias is None else child.bias.to(context.dtype)
                setattr(parent, name, SwappedLinear(method, bias))
        self.finish()

    def finish(self) -> None:
        """Lets methods repack the loaded weights."""
        for module in self.whole.modules():
            if isinstance(module, LinearMethod):
                module.finish()

    def load_gguf(self, file: Path, context: ModelContext) -> None:
        """Loads the weights of a GGUF file. Matrices and embeddings that are quantized in the file
        keep the stored values; other quantized tensors are dequantized."""
        self.whole.tie_weights()
        model, stored = GGUFModel(file), tensors_to_run(self.config, stored_tensors(file))
        quantized = {name for name, tensor in stored.items() if tensor.dtype not in FLOATS}
        names = {name for name, _ in self.whole.named_parameters()} | stored.keys()
        slots: dict[str, WeightSlot] = {}
        for path, module in list(self.whole.named_modules()):
            if f"{path}.0.down_proj.weight" in quantized and (activation := gate_of(module)):
                experts = SwappedExperts(path, module, activation, context)
                slots |= experts.weight_slots(path)
                self.whole.set_submodule(path, experts)
            make = {
                nn.Linear: context.kernels.linear, nn.Embedding: context.kernels.embedding
            }.get(type(module))  # fmt: skip
            if f"{path}.weight" not in quantized or make is None:
                continue
            method, shape = make(path), tuple(module.weight.shape)
            method.create(shape, context.stored_dtype, context.device)
            slots[f"{path}.weight"] = method.weight_slot(path, MatrixPart(shape))
            if type(module) is nn.Linear:
                self.whole.set_submodule(path, SwappedLinear(method, module.bias))
                continue
            self.whole.set_submodule(path, SwappedEmbedding(method, context.dtype))
            if self.config.tie_word_embeddings:
                bias = self.whole.get_output_embeddings().bias
                self.whole.set_output_embeddings(SwappedLinear(method, bias))
        differences, values = model.differences, model.differences.values(model.metadata)
        for name, tensor in (*self.whole.named_buffers(), *self.whole.named_parameters()):
            if name in values:
                tensor.fill_(values[name])
            elif name in names:
                offset = float(differences.one_plus_weight and name.endswith("norm.weight"))
                slots[name] = parameter_slot(name, tensor, offset)
        load_weights(accept_blocks(slots, stored), stored)
        self.finish()

    def probe(self, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the logits of a few tokens with transformers' own attention, and over cached keys
        and values, in two steps and in one."""
        ids = torch.arange(1, PROBE_TOKENS + 1, device=device) * 7 % self.config.vocab_size
        self.whole.set_attn_implementation("eager")
        expected = self.whole(input_ids=ids[None], use_cache=False).logits[0]
        self.whole.set_attn_implementation(INTERFACE)
        found = []
        for cuts in ((0, PROBE_SPLIT, PROBE_TOKENS), (0, PROBE_TOKENS)):
            self.calls, self.past = [], {}
            positions = torch.arange(PROBE_TOKENS, device=device)
            parts = [
                self.body(ids[first:end], positions[first:end]) for first, end in pairwise(cuts)
            ]
            found.append(self.logits(torch.cat(parts)))
        return expected, found

    def attend_probe(
        self, module: nn.Module, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of T tokens over the probe's earlier tokens and themselves."""
        self.calls.append((module, spec))
        if module in self.past:
            k, v = (torch.cat(pair) for pair in zip(self.past[module], (k, v), strict=True))
        self.past[module] = k, v
        keys = torch.arange(len(k), device=k.device)
        naive = NaiveBackend(device=q.device, dtype=q.dtype, head_dim=spec.head_dim, block_size=16)
        return naive.attend_dense(q, k, v, keys[len(k) - len(q) :], keys, spec)

    def check(self, expected: torch.Tensor, found: list[torch.Tensor]) -> None:
        """Checks the logits of a probe, and its calls, which must be one per layer.

        The mean difference of logits may be 1e-4 of the largest logit.

        Raises:
            UnsupportedModelError: logits differ, or the calls don't agree with the config.
        """
        config, calls = self.config, self.calls
        shapes = {(spec.num_kv_heads, spec.head_dim) for _, spec in calls}
        shape = config.num_key_value_heads, config.head_dim
        limit = 1e-4 * float(expected.abs().max())
        split, at_once = (float((logits - expected).abs().mean()) <= limit for logits in found)
        for holds, reason in (
            (len(calls) == config.num_hidden_layers, f"its {config.num_hidden_layers} layers call"
             f" AttentionInterface {len(calls)} times"),
            (len({module for module, _ in calls}) == len(calls), "it runs layers repeatedly"),
            (shapes == {shape}, f"its KV heads have the shapes {shapes}, not {shape}"),
            (at_once, "its attention is not causal, or more than a window, sinks and a soft cap"),
            (split, "a token depends on earlier ones outside of attention"),
        ):  # fmt: skip
            if not holds:
                raise UnsupportedModelError(reason)

    def body(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and their positions, [T] each -> hidden states [T, hidden_size]."""
        out = self.whole.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
        return out.last_hidden_state[0]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the hidden states of the tokens with logits, [L, hidden_size]."""
        self.batch = batch
        hidden = self.body(batch.token_ids.long(), batch.positions.long())
        return hidden if batch.logits_indices is None else hidden[batch.logits_indices]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] -> [L, vocab_size], including the model's scaling or soft cap."""
        modules, name = self.whole._modules, self.whole.base_model_prefix
        self.hidden.states, body = hidden, modules[name]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        modules[name] = self.hidden
        try:
            return self.whole(input_ids=ids, use_cache=False).logits[0]
        finally:
            modules[name] = body

    def most_likely(self, hidden: torch.Tensor, masks: object = None) -> None:
        """Returns None: the head is transformers' own, so all logits are computed."""
