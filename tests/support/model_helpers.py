"""For model tests: attention without a KV cache, batches of whole prompts, and building models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanoengine.attention.base import AttentionBackend, LayerCache
from nanoengine.attention.batch import Batch, ScanStep, SequenceSegment
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.layers.kernels import Kernels
from nanoengine.layers.layer import ModelContext
from nanoengine.models.decoder import CausalLM
from nanoengine.models.loader import load_model
from nanoengine.runner.options import make_kernels


class DenseAttention(AttentionBackend):
    """Attention over whole prompts without a KV cache: all keys of a sequence are in its batch."""

    name, kv_layout, default_block_size, graph_safe = "dense", "PKD", 16, False

    def __init__(self) -> None:
        self.stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, batch: Batch) -> None:
        return None

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        assert cache.k_cache.numel() == cache.v_cache.numel() == 0
        self.stored[id(cache.k_cache)] = k, v  # a later layer may use the same keys and values

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        out, spec = [], cache.spec
        for start, end in itertools.pairwise(batch.query_start_loc.tolist()):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
            mask = (distance >= 0) & (distance < (spec.sliding_window or end))
            heads = [x[start:end].transpose(0, 1) for x in (q, *self.stored[id(cache.k_cache)])]
            q_heads, k_heads, v_heads = heads
            groups = len(q_heads) // len(k_heads)
            scores = q_heads @ k_heads.repeat_interleave(groups, 0).mT * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(~mask, -torch.inf)
            if spec.sinks is not None:
                sinks = spec.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, end - start, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[..., : end - start]
            attended = weights @ v_heads.repeat_interleave(groups, 0)
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


def prefill_batch(prompts: Sequence[Sequence[int]]) -> Batch:
    """All tokens of all prompts in one step."""
    lengths = [len(prompt) for prompt in prompts]
    return Batch(
        token_ids=torch.tensor(list(itertools.chain(*prompts))),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        slot_mapping=torch.zeros(1, sum(lengths), dtype=torch.int64),
        query_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(1, len(lengths), 1, dtype=torch.int32),
        logits_indices=torch.arange(sum(lengths)),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        state_waves=(prefill_wave(lengths),),
    )


def prefill_wave(lengths: Sequence[int]) -> ScanStep:
    """Prompts of these lengths; their final states are written to slots 1, 2, ..."""
    none, ends = torch.empty(0, dtype=torch.int64), itertools.accumulate(lengths)
    spans = [
        SequenceSegment(end - n, end, 0, 0, ((n, slot),))
        for slot, (n, end) in enumerate(zip(lengths, ends, strict=True), start=1)
    ]
    return ScanStep(tokens=none, reads=none, writes=none, spans=tuple(spans))


def random_prompts(*lengths: int) -> list[list[int]]:
    """Seeded prompts of these lengths over the tiny vocabulary."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def cpu_kernels(
    dtype: torch.dtype = torch.float32, quantization: Quantization | None = None
) -> Kernels:
    """The CPU kernels for a model of this dtype, with dense attention."""
    return make_kernels(
        DenseAttention(), device=torch.device("cpu"), dtype=dtype, quantization=quantization
    )


def make_context(dtype: torch.dtype = torch.float32, **fields: Any) -> ModelContext:
    """A context in plain torch on the CPU with dense attention; `fields` override it."""
    fields.setdefault("device", torch.device("cpu"))
    fields.setdefault("kernels", Kernels(DenseAttention()))
    return ModelContext(dtype=dtype, **fields)


def build(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    load_format: str = "auto",
    seed: int = 0,
    **fields: Any,
) -> CausalLM:
    """The model of a checkpoint directory."""
    config = load_model_config(directory)
    context = make_context(dtype, **fields)
    return load_model(config, directory, context=context, load_format=load_format, seed=seed)


def all_logits(model: CausalLM, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of every position of every prompt, [tokens, vocab_size]."""
    for layer in model.recurrent_layers:
        wide = torch.promote_types(model.model.norm.weight.dtype, torch.float32)
        layer.bind(torch.zeros(1 + len(prompts), model.config.states.size, dtype=wide))
    with torch.inference_mode():
        return model.logits(model.forward(prefill_batch(prompts)))


def transformers_logits(model: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """`all_logits` of a transformers model, prompt by prompt."""
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
