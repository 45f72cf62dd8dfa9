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
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from nanoengine.attention.base import AttentionSpec
from nanoengine.attention.batch import Batch
from nanoengine.attention.naive import NaiveBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.attention import Attention
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.settings.checks import truncate

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
            source = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
            if dummy:
                self.whole = AutoModelForCausalLM.from_config(source, **options)
            else:
                options |= {"config": source, "key_mapping": TEXT_PART_NAMES}
                self.whole = AutoModelForCausalLM.from_pretrained(directory, **options)
            self.whole.eval().requires_grad_(False).to(context.device)
            for module in self.whole.modules():
                vars(module)["model_of_step"] = self
            self.whole.set_experts_implementation("eager")  # which supports every size and dtype
            text_config = self.whole.config.get_text_config(decoder=True)
            window = getattr(text_config, "sliding_window", None)
            if any(self.windows):  # Why: masks read the window in each forward.
                text_config.sliding_window = PROBE_WINDOW
            self.check(*self.probe(context.device))
            text_config.sliding_window = window
            self.swap_linears(context)
            self.whole.to(context.dtype)
            calls, self.calls, self.past = self.calls, [], {}
            # Fails if a module reads a swapped weight.
            self.logits(self.body(*torch.zeros(2, 1, dtype=torch.long, device=context.device)))
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
        """Replaces the body's linear layers by this engine's. The head stays: it may be tied."""
        for path, parent in list(self.whole.base_model.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) not in (nn.Linear, Conv1D) or name.endswith(ROUTERS):
                    continue
                weight = child.weight if type(child) is nn.Linear else child.weight.T
                method = context.kernels.linear(f"{path}.{name}")
                method.create(tuple(weight.shape), context.stored_dtype, context.device)
                method.load(weight.detach().contiguous())
                method.finish()
                bias = None if child.bias is None else child.bias.to(context.dtype)
                setattr(parent, name, SwappedLinear(method, bias))

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
        shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for _, spec in calls}
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        limit = 1e-4 * float(expected.abs().max())
        split, at_once = (float((logits - expected).abs().mean()) <= limit for logits in found)
        for holds, reason in (
            (len(calls) == config.num_hidden_layers, f"its {config.num_hidden_layers} layers call"
             f" AttentionInterface {len(calls)} times"),
            (len({module for module, _ in calls}) == len(calls), "it runs layers repeatedly"),
            (shapes == {heads}, f"its attention heads have the shapes {shapes}, not {heads}"),
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
