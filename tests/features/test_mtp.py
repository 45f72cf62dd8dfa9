"""Drafts by a checkpoint's MTP layer, in whole engines: they are right, and change no bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from nanoengine import HostTier
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.mtp import with_mtp_layer
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.errors import ConfigError, UnsupportedModelError
from nanoengine.settings.params import SamplingParams
from tests.support.drafts import draft_always
from tests.support.engines import checkpoint, finish, greedy, make_engine, run, tokens
from tests.support.mtp import LAYERS, TEXT, mtp_checkpoint, mtp_gguf, mtp_model

STEPS = 12
"""Training steps after which a model knows most of the text."""
PROMPTS = [TEXT[:21], TEXT[40:57], TEXT[:5], [*TEXT[:16], *TEXT[60:70]], TEXT[:21], TEXT[30:63]]
NUM_TOKENS = 20


def mtp_engine(path: str, k: int = 2, **options: object):
    return draft_always(make_engine(path, speculative=f"mtp:k={k}", **options))


def model_path(family: str, kind: str | None = None) -> str:
    return mtp_gguf(family, STEPS, kind) if kind else mtp_checkpoint(family, STEPS)


def logprobs(requests) -> list:
    return [[seq.extras.logprobs for seq in request.sequences] for request in requests]


@pytest.mark.parametrize("kind", [None, "F32"])
@pytest.mark.parametrize("family", LAYERS)
def test_drafts_equal_the_ones_of_a_reference(family, kind):
    """A random model, whose drafts are wrong: each follows from other keys and hidden states."""
    reference, compared, chunk = mtp_model(family, 0), [], 7 if kind else 0
    path = mtp_gguf(family, 0, kind) if kind else mtp_checkpoint(family, 0)
    engine = mtp_engine(path, k=3, block_size=8, long_prefill_threshold=chunk)
    drafter = engine.proposer.drafter.fallback

    def draft(sequences, counts, draft=drafter.draft):
        found = draft(sequences, counts)
        for seq, count, drafts in zip(sequences, counts, found, strict=True):
            assert list(drafts) == reference.drafts(seq.token_ids, count)
            compared.append(len(drafts))
        return found

    drafter.draft = draft
    for _ in range(2):  # the second run hits the first one's blocks
        run(engine, PROMPTS[:3], greedy(NUM_TOKENS))
    assert sum(compared) > 200 and {2, 3} <= set(compared)
    assert engine.stats().cache_hit_tokens > 16


FORMS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CASES = [
    *[("glm4_moe", form, None) for form in ("float32", "bfloat16", "int8")],
    *[("deepseek_v3", form, None) for form in ("float32", "int4")],
    ("qwen3_5", "float32", None),
    ("qwen3_next", "int4", None),
    ("glm4_moe", "float32", "Q4_0"),
    ("qwen3_5", "float32", "Q8_0"),
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2),
    "n": SamplingParams(
        n=2, temperature=0.7, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2
    ),
}


@pytest.mark.parametrize(("family", "form", "kind"), CASES)
def test_tokens_and_log_probabilities_have_the_same_bits(family, form, kind):
    """With one stream and with eight, preemptions, prefix hits, forks and chunks."""
    options = {"attention_backend": "cpu", "dtype": "float32", "block_size": 8} | FORMS[form]
    path = model_path(family, kind)
    plain = make_engine(path, max_num_seqs=1, num_kv_blocks=60, max_model_len=96, **options)
    expected = {name: run(plain, PROMPTS, params) for name, params in PARAMS.items()}
    for more in (
        {"max_num_seqs": 1, "num_kv_blocks": 60},
        {"max_num_seqs": 8, "num_kv_blocks": 25, "long_prefill_threshold": 11},
    ):
        engine = mtp_engine(path, max_model_len=96, **options, **more)
        for name in (*PARAMS, "greedy"):
            found = run(engine, PROMPTS, PARAMS[name])
            assert tokens(found) == tokens(expected[name])
            assert logprobs(found) == logprobs(expected[name])
        stats = engine.stats()
        assert stats.accepted_tokens > 30 and stats.drafted_tokens > stats.accepted_tokens
        assert stats.cache_hit_tokens > 30
        assert (stats.preemptions > 0) is (more["num_kv_blocks"] == 25)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_forks_between_steps_and_overlapped_steps(family):
    path = mtp_checkpoint(family, STEPS)
    (expected,) = tokens(run(make_engine(path), [TEXT[:21]], greedy(NUM_TOKENS)))[0]
    engine = mtp_engine(path, block_size=8, overlap=True)
    request = engine.add_request("a", TEXT[:21], greedy(NUM_TOKENS))
    for _ in range(3):
        engine.step()
    engine.finish_in_flight()
    engine.fork("a")
    engine.step()
    engine.finish_in_flight()
    engine.fork("a", index=1, next_token_id=11)
    finish(engine)
    assert [seq.output_token_ids for seq in request.sequences[:2]] == [expected, expected]
    assert engine.stats().accepted_tokens > 5


def test_the_memory_plan_includes_the_layer():
    path, size = mtp_checkpoint("glm4_moe", STEPS), {"block_size": 8, "kv_cache_gib": 0.01}
    plain, engine = make_engine(path, **size), make_engine(path, speculative="mtp", **size)
    assert 2 * engine.info.block_bytes == 3 * plain.info.block_bytes
    assert engine.executor.weight_bytes > plain.executor.weight_bytes


def test_a_closed_engine_keeps_neither_weights_nor_cache():
    engine = mtp_engine(mtp_checkpoint("glm4_moe", STEPS), attention_backend="cpu", dtype="float32")
    run(engine, PROMPTS[:2], greedy(4))
    held = [weakref.ref(part) for part in (engine.executor.model, engine.executor.kv_cache)]
    engine.close()
    gc.collect()
    assert not any(ref() for ref in held)


def test_models_without_an_mtp_layer_and_unsupported_options_raise():
    path = mtp_checkpoint("glm4_moe", STEPS)
    for model in ("glm4_moe", "qwen3"):
        with pytest.raises(UnsupportedModelError, match="needs a checkpoint with the MTP layer"):
            make_engine(checkpoint(model), speculative="mtp")
    stored = StoredQuantization(format="fp8", bits=8, group_size=None, activations="fp8")
    config = replace(load_model_config(mtp_checkpoint("qwen3_5", STEPS)), quantization=stored)
    with pytest.raises(UnsupportedModelError, match="whose weights are stored in"):
        with_mtp_layer(config, ["mtp.fc.weight"])
    for options in ({"kv_tiers": [HostTier(gib=0.01)]}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="speculative='mtp' is not supported"):
            make_engine(path, speculative="mtp", **options)
    with pytest.raises(ConfigError, match="the options of 'mtp' are k"):
        make_engine(path, speculative="mtp:max=2")
