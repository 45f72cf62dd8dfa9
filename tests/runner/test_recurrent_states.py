"""Linear-attention and SSM models: all features generate the tokens of single prompts, and the cost
of a decode does not grow with its context."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoengine import ConfigError, DiskTier, HostTier, SamplingParams
from nanoengine.attention.batch import SequenceSegment
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.delta_rule import CHUNK, DeltaInputs, scan, step
from tests.support.drafts import draft_always
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import make_context
from tests.support.processors import Foretold
from tests.support.recurrent_states import random_inputs

SHARED = random_prompts(1, [150], seed=3)[0]
PROMPTS = [SHARED[:140] + tail for tail in random_prompts(3, [9, 4, 17], seed=4)]
PROMPTS += random_prompts(2, [70, 5], seed=5)
FAMILIES = ["qwen3_5", "lfm2_moe", "lfm3", "falcon_h1", "nemotron_h"]
NUM_TOKENS = 20
DRAWN = {"temperature": 1.0, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True}
PARAMS = {1: greedy(NUM_TOKENS), 3: SamplingParams(n=3, **DRAWN)}


def engine_of(family: str, **options):
    defaults = {"block_size": 8, "num_kv_blocks": 120, "max_model_len": 256, "max_num_seqs": 5}
    return make_engine(checkpoint(family), **(defaults | options))


@functools.cache
def expected(family: str, n: int = 1):
    """Each prompt alone, without a prefix cache, in one chunk."""
    engine = engine_of(family, enable_prefix_caching=False)
    return [tokens(run(engine, [prompt], PARAMS[n]))[0] for prompt in PROMPTS]


NGRAM = "ngram:max=2,min=1,k=4"
CASES = {
    "hits in one step and after it": {},
    "hits, overlapped": {"overlap": True},
    "chunks that end anywhere": {"max_num_batched_tokens": 13},
    "too few blocks": {"num_kv_blocks": 30, "max_model_len": 200},
    "drafts": {"speculative": NGRAM},
    "drafts, too few blocks": {"speculative": NGRAM, "num_kv_blocks": 30, "max_model_len": 200},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_match_single_prompts(family, case):
    engine = engine_of(family, **CASES[case])
    if "speculative" in CASES[case]:
        draft_always(engine)
    for _ in range(2):
        assert tokens(run(engine, PROMPTS, PARAMS[1])) == expected(family)
    stats = engine.stats()
    if "num_kv_blocks" in CASES[case]:
        assert stats.preemptions > 0
    else:
        assert stats.cache_hit_tokens > 4 * 128
        assert stats.prefill_tokens < 800


class KnownDrafts:
    """Drafts from known outputs, up to five tokens; some are wrong."""

    def __init__(self, requests) -> None:
        self.outputs = {
            (tuple(request.prompt_token_ids), seq.index): seq.output_token_ids
            for request in requests
            for seq in request.sequences
        }

    def needs_tokens(self) -> bool:
        return True

    def propose(self, sequences):
        return [self.drafts(seq) for seq in sequences]

    def drafts(self, seq):
        output = self.outputs[tuple(seq.request.prompt_token_ids), seq.index]
        done = seq.num_output_tokens
        return tuple(
            token if (done + n) % 7 else token ^ 1
            for n, token in enumerate(output[done : done + done % 6])
        )


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, {}) for family in ("qwen3_next", "lfm2_moe", "lfm3", "falcon_h1", "bamba")),
        *((family, {"dtype": "bfloat16"}) for family in ("qwen3_next", "falcon_h1")),
        *((family, {"quantization": "int8"}) for family in ("qwen3_next", "lfm2_moe")),
    ],
)
def test_drafts_do_not_change_a_bit(family, form):
    """Right and wrong drafts, of one sequence and of eight, with forks and prefix hits."""
    options = {"attention_backend": "cpu", "dtype": "float32", "num_kv_blocks": 500} | form
    for params in (greedy(40), SamplingParams(n=2, **DRAWN)):
        params = replace(params, logprobs=2)
        plain = run(engine_of(family, max_num_seqs=1, **options), PROMPTS, params)
        engine = engine_of(family, max_num_seqs=8, speculative=NGRAM, **options)
        engine.proposer = KnownDrafts(plain)
        for _ in range(2):
            found = run(engine, PROMPTS, params)
            assert tokens(found) == tokens(plain)
            for one, other in zip(found, plain, strict=True):
                for a, b in zip(one.sequences, other.sequences, strict=True):
                    assert a.extras.logprobs == b.extras.logprobs
        stats = engine.stats()
        assert stats.drafted_tokens - 20 > stats.accepted_tokens > 100
        assert stats.cache_hit_tokens > 4 * 128


def test_jump_forward_tokens_do_not_change_outputs():
    """Of six states, a few are free for drafts."""
    answers = expected("qwen3_5")
    texts = dict(zip(map(tuple, PROMPTS), (answer for (answer,) in answers), strict=True))
    engine = engine_of("qwen3_5", max_num_seqs=3, logits_processors=[Foretold(texts, right=True)])
    assert tokens(run(draft_always(engine), PROMPTS, PARAMS[1])) == answers
    assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_have_their_own_states(family):
    """With more sequences than rows, some wait, and compute the end of their prompt again."""
    found = tokens(run(engine_of(family), PROMPTS, PARAMS[3]))
    assert found == expected(family, 3)
    assert all(len({tuple(ids) for ids in answers}) > 1 for answers in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_snapshots_are_loaded_from_host_memory(family):
    tiers = (HostTier(gib=0.01, policy="load"),)
    engine = engine_of(family, num_kv_blocks=30, max_model_len=200, kv_tiers=tiers)
    storage, loaded = engine.executor.tier_storage["host"], []
    load = storage.load

    def watched(src_ids, dst_ids):
        loaded.extend(dst_ids)
        return load(src_ids, dst_ids)

    storage.load = watched
    for _ in range(2):
        for prompt, answer in zip(PROMPTS, expected(family), strict=True):
            assert tokens(run(engine, [prompt], greedy(NUM_TOKENS)))[0] == answer
    states = [block_id for block_id in loaded if block_id >= 30]
    assert states and len(loaded) > 10 + len(states)


def test_unsupported_options_raise(tmp_path):
    tiers = (HostTier(gib=0.01), DiskTier(path=str(tmp_path), gib=0.01))
    with pytest.raises(ConfigError, match="DiskTier is not supported for models with recurrent"):
        engine_of("qwen3_5", kv_tiers=tiers)


def test_the_memory_plan_includes_recurrent_states():
    engine = engine_of("qwen3_5", num_kv_blocks=None, kv_cache_gib=0.001)
    memory, layout = engine.executor.memory, engine.scheduler.block_manager.layout
    state_bytes = 2 * (4 * 16 * 24 + 3 * (2 * 2 * 16 + 4 * 24)) * 8
    assert layout == memory.layout
    assert layout.state_bytes == state_bytes
    used = layout.num_states * state_bytes + memory.kv_bytes
    assert 0.9 < used / (0.001 * 2**30) <= 1
    assert "states: 10 of 0.03 MiB, each as much as 32 tokens" in str(memory)
    assert engine.executor.kv_cache.states.nbytes == 11 * state_bytes


class CountBytes(TorchDispatchMode):
    """Counts the bytes that all operations read and write."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor):
                self.num_bytes += value.nbytes
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_work_of_a_decode_is_independent_of_the_context_length(family):
    engine = engine_of(family, max_model_len=512, num_kv_blocks=200)
    work = []
    for layer in engine.executor.model.recurrent_layers:

        def counted(*args, forward=layer.forward):
            with CountBytes() as counter:
                out = forward(*args)
            work.append(counter.num_bytes)
            return out

        layer.forward = counted
    found = {}
    for length in (16, 480):
        engine.add_request(str(length), random_prompts(1, [length])[0], greedy(4))
        engine.step()
        work.clear()
        while engine.has_unfinished():
            engine.step()
        found[length] = list(work)
    assert found[16] == found[480] and len(found[16]) == 6


# --- the recurrent rules --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, CHUNK, 2 * CHUNK + 9])
@pytest.mark.parametrize("position", [0, 1, CHUNK - 1, CHUNK])
def test_chunks_match_single_tokens(count, position):
    inputs = random_inputs(count)
    states = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    first, one = states[1].clone(), torch.tensor([1])
    expected = [step(inputs.part(slice(t, t + 1)), states, one, one) for t in range(count)]
    out, last = scan(inputs, first, position)
    assert torch.allclose(out, torch.cat(expected), rtol=1e-10, atol=1e-12)
    assert torch.allclose(last, states[1], rtol=1e-10, atol=1e-12)


def test_a_prompt_split_at_a_chunk_boundary_has_the_same_bits():
    inputs = DeltaInputs(*(tensor.float() for tensor in random_inputs(3 * CHUNK)))
    zero = torch.zeros(3, 8, 6)
    whole, last = scan(inputs, zero, 0)
    head, between = scan(inputs.part(slice(CHUNK)), zero, 0)
    tail, end = scan(inputs.part(slice(CHUNK, None)), between, CHUNK)
    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(end, last)


def test_a_convolution_of_a_chunk_has_the_bits_of_single_tokens():
    conv = CausalConv(4, 6, bias=True, rank_channels=(6, torch.arange(6)), context=make_context())
    torch.manual_seed(0)
    conv.weight.copy_(torch.randn(4, 6))
    conv.bias.copy_(torch.randn(6))
    conv.bind(torch.zeros(3, 18))
    x, slot = torch.randn(9, 6), torch.tensor([1])
    single = [conv.step(x[t : t + 1], slot * (t > 0), slot) for t in range(9)]
    out = conv.scan(x, SequenceSegment(0, 9, 0, 0, ((5, 1), (9, 2))))
    assert torch.equal(out, torch.cat(single))
    assert torch.equal(conv.states[2], x[6:])
    assert torch.equal(conv.states[1], x[2:5])
