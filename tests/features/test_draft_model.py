"""A draft model in whole engines: tokens never change, and its KV cache is correct.

With the target itself as draft model, drafts are right exactly when the KV cache is correct.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from nanoengine import HostTier
from nanoengine.errors import ConfigError
from nanoengine.features.speculative.drafting import Drafting
from nanoengine.settings.params import SamplingParams
from tests.support.drafts import draft_always
from tests.support.engines import (
    checkpoint,
    finish,
    greedy,
    make_engine,
    random_prompts,
    run,
    tokens,
)

NUM_TOKENS = 24
OPTIONS = {
    "large": {"block_size": 8},
    "small-pool": {"block_size": 8, "num_kv_blocks": 25},
    "chunks-overlap": {"block_size": 16, "long_prefill_threshold": 7, "overlap": True},
}
PARAMS = {
    "greedy": greedy(NUM_TOKENS),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=NUM_TOKENS),
    "n": SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True),
}


def prompts() -> list[list[int]]:
    """Prompts; some share a prefix, two are equal."""
    distinct = random_prompts(4, [5, 17, 33, 40], seed=3)
    return [*distinct, distinct[3][:24] + distinct[1], distinct[2]]


def drafting_engine(draft: str, **options: object):
    return draft_always(make_engine(checkpoint("qwen3"), speculative=draft, **options))


@pytest.mark.parametrize(
    ("where", "what"),
    [("large", "greedy"), ("small-pool", "seeded"), ("small-pool", "n"), ("chunks-overlap", "n")],
)
def test_all_drafts_of_the_target_itself_are_accepted(where, what):
    options, params = OPTIONS[where], PARAMS[what]
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts(), params))
    engine = drafting_engine(checkpoint("qwen3") + ":k=3", **options)
    for _ in range(2):  # the second run hits the first run's cache
        assert tokens(run(engine, prompts(), params)) == expected
    stats = engine.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 100
    assert stats.cache_hit_tokens > 0
    assert (stats.preemptions > 0) is ("num_kv_blocks" in options)


def test_a_poor_draft_model_with_windows_does_not_change_the_output():
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts(), greedy(NUM_TOKENS)))
    draft = checkpoint("mistral", sliding_window=16)
    engine = drafting_engine(draft, **OPTIONS["small-pool"])
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == expected
    stats = engine.stats()
    assert stats.drafted_tokens > 5 * stats.accepted_tokens


def test_blocks_filled_without_drafting_are_correct_in_both_caches():
    """Outputs computed without drafting are in the cache, and the next prompt begins with one."""
    engine = make_engine(
        checkpoint("qwen3"), speculative=checkpoint("qwen3"), block_size=8, max_num_seqs=4
    )
    eager = engine.proposer
    engine.proposer = None
    requests = run(engine, prompts(), greedy(40))
    engine.proposer = eager
    draft_always(engine)
    longer = [r.prompt_token_ids + r.sequences[0].output_token_ids + [9] for r in requests]
    before = engine.stats().cache_hit_tokens
    again = tokens(run(engine, longer, greedy(NUM_TOKENS)))
    assert again == tokens(run(make_engine(checkpoint("qwen3")), longer, greedy(NUM_TOKENS)))
    stats = engine.stats()
    assert stats.cache_hit_tokens - before > 200
    assert stats.drafted_tokens == stats.accepted_tokens > 50


class EverySecondTime:
    """Proposes in every second step, so that plain decodes follow wrong drafts."""

    def __init__(self, proposer: Drafting) -> None:
        self.proposer, self.calls = proposer, 0

    def propose(self, sequences):
        self.calls += 1
        return self.proposer.propose(sequences) if self.calls % 2 else [()] * len(sequences)

    def needs_tokens(self) -> bool:
        return True


def test_rejected_drafts_leave_no_trace_in_cached_blocks():
    """The draft model ignores penalties, so right and wrong drafts alternate."""
    penalized = SamplingParams(temperature=0, frequency_penalty=1.5, max_tokens=60, ignore_eos=True)
    engine = drafting_engine(checkpoint("qwen3"), block_size=8)
    engine.proposer = EverySecondTime(engine.proposer)
    run(engine, prompts(), penalized)
    stats = engine.stats()
    assert 20 < stats.accepted_tokens < stats.drafted_tokens - 20
    pool = engine.scheduler.block_manager.pool
    full = [block.block_id for block in pool.blocks if block.prefix is not None]
    assert len(full) > 30
    mine, draft = engine.executor.kv_cache.kv, engine.executor.draft.kv_cache.kv
    torch.testing.assert_close(draft[:, :, full], mine[:, :, full], rtol=1e-9, atol=1e-9)


def test_forks_between_steps():
    (prompt,) = random_prompts(1, [21])
    expected = tokens(run(make_engine(checkpoint("qwen3")), [prompt], greedy(NUM_TOKENS)))[0][0]
    engine = drafting_engine(checkpoint("qwen3"), block_size=8)
    request = engine.add_request("a", prompt, greedy(NUM_TOKENS))
    for _ in range(3):
        engine.step()
    engine.fork("a")
    engine.step()
    engine.fork("a", index=1, next_token_id=11)
    finish(engine)
    assert [seq.output_token_ids for seq in request.sequences[:2]] == [expected, expected]
    stats = engine.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 30


def test_the_memory_plan_counts_both_models():
    alone = make_engine(checkpoint("qwen3"), block_size=8, kv_cache_gib=0.01)
    both = make_engine(
        checkpoint("qwen3"), block_size=8, kv_cache_gib=0.01, speculative=checkpoint("qwen3")
    )
    assert both.info.block_bytes == 2 * alone.info.block_bytes
    assert both.info.num_kv_blocks == alone.info.num_kv_blocks // 2
    memory = both.executor.memory
    assert memory.weight_bytes == 2 * alone.executor.memory.weight_bytes
    assert both.executor.draft.kv_cache.kv.shape[2] == both.info.num_kv_blocks


def test_unsuitable_draft_models_raise_and_are_named(tmp_path: Path):
    directory = checkpoint("qwen3")
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    words = {"model": {"vocab": {"a": 0}}}
    (other / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    mine = tmp_path / "mine"
    shutil.copytree(other, mine)
    (mine / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    window = checkpoint("mistral", sliding_window=16)
    cases = [
        (directory, checkpoint("qwen3", vocab_size=128), {}, r"another vocabulary \(128 tokens\)"),
        (str(mine), str(other), {}, "another vocabulary"),
        (directory, checkpoint("qwen3", max_position_embeddings=64), {"max_model_len": 100},
         "context of 64 tokens is shorter than max_model_len=100"),
        (window, directory, {}, "needs a model whose layers all have full attention"),
        (directory, "ngramm", {}, "'mtp' nor a draft model: .*'ngramm' does not exist"),
        (directory, directory, {"kv_tiers": [HostTier(gib=0.01)]}, "not supported with kv_tiers"),
        (directory, directory, {"tensor_parallel_size": 2}, "or with tensor_parallel_size"),
    ]  # fmt: skip
    for target, draft, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            make_engine(target, speculative=draft, **options)
