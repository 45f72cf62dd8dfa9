"""Speculative decoding in whole engines: tokens equal the tokens of an engine without drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nanoengine import DiskTier, HostTier
from nanoengine.features.beam import BeamSearch, BeamSearchParams
from nanoengine.llm import LLM
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
NGRAM = "ngram:max=3,min=1,k=4"


def prompts() -> list[list[int]]:
    """Partly repetitive texts; two are equal."""
    parts = random_prompts(6, [3, 9, 14], seed=2)
    texts = [part * 3 for part in parts]
    return [*texts, parts[0] + parts[1] + parts[0] + parts[1][:4], texts[2]]


def drafting_engine(**options: object):
    return draft_always(make_engine(checkpoint("qwen3"), speculative=NGRAM, **options))


def both(params: SamplingParams | list[SamplingParams], **options: object):
    """Returns the requests of engines without and with drafts, and the counters of the latter."""
    plain = run(make_engine(checkpoint("qwen3")), prompts(), params)
    engine = drafting_engine(**options)
    requests = run(engine, prompts(), params)
    return plain, requests, engine.stats()


PARAMS = {
    "greedy": greedy(NUM_TOKENS),
    "seeded": SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=NUM_TOKENS),
    "cold": SamplingParams(temperature=0.05, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    "n": SamplingParams(n=3, temperature=0.3, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=NUM_TOKENS,
        min_tokens=9, logit_bias={7: 2.0}, ignore_eos=True,
    ),
    "one token": greedy(1),
    "two tokens": greedy(2),
}  # fmt: skip


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 8},
        {"block_size": 8, "num_kv_blocks": 16, "overlap": True},
        {"block_size": 8, "long_prefill_threshold": 7, "max_num_batched_tokens": 16,
         "max_num_seqs": 5},
    ],
    ids=["large", "small-pool-overlap", "chunks"],
)  # fmt: skip
def test_ngram_drafts_never_change_the_output(params, options):
    plain, requests, stats = both(params, **options)
    assert tokens(requests) == tokens(plain)
    if params.max_tokens > 2:
        assert stats.drafted_tokens > stats.accepted_tokens > 0, "drafts were meant to be made"
        assert 0 < stats.saved_steps <= stats.accepted_tokens
    if "num_kv_blocks" in options and params.max_tokens > 2:
        assert stats.preemptions > 0


def test_drafts_do_not_change_logprobs_and_prompt_logprobs():
    params = dataclasses.replace(greedy(NUM_TOKENS), logprobs=3, prompt_logprobs=1)
    plain, requests, stats = both(params)
    assert stats.accepted_tokens > 0
    for one, other in zip(plain, requests, strict=True):
        assert len(one.sequences[0].extras.logprobs) == NUM_TOKENS
        for a, b in zip(
            one.sequences[0].extras.logprobs, other.sequences[0].extras.logprobs, strict=True
        ):
            assert [entry.token_id for entry in a] == [entry.token_id for entry in b]
            assert [e.logprob for e in a] == pytest.approx([e.logprob for e in b], abs=1e-9)
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)


def test_a_second_run_with_drafts_hits_the_cache_of_the_first(tmp_path: Path):
    tiers = [HostTier(gib=0.001, policy="load"), DiskTier(tmp_path, gib=0.01, policy="load")]
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts(), greedy(NUM_TOKENS)))
    engine = drafting_engine(block_size=8, num_kv_blocks=20, kv_tiers=tiers)
    for _ in range(2):
        assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == expected
    stats = engine.stats()
    assert stats.cache_hit_tokens > 0 and stats.tiers[0].loaded_blocks > 0
    engine.close()


def test_a_stop_string_inside_accepted_drafts_ends_the_text_there(tmp_path: Path):
    prompt = "the cat sat. the cat sat. the cat sat. the cat"
    options = {"model": demo_model(), "max_model_len": 256}
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(**options) as llm, LLM(**options, speculative="ngram") as drafting:
        draft_always(drafting.engine)
        (text,) = [output.outputs[0].text for output in llm.generate(prompt, free, use_tqdm=False)]
        words = text.split()
        for params in (
            free,
            dataclasses.replace(free, stop=[words[len(words) // 2]]),
            dataclasses.replace(free, stop=[text[11:15]], include_stop_str_in_output=True),
            dataclasses.replace(free, max_tokens=13),
        ):
            (one,) = llm.generate(prompt, params, use_tqdm=False)
            (other,) = drafting.generate(prompt, params, use_tqdm=False)
            for name in ("text", "token_ids", "finish_reason", "stop_reason"):
                assert getattr(other.outputs[0], name) == getattr(one.outputs[0], name)
        assert drafting.stats().accepted_tokens > 20


def demo_model() -> str:
    from nanoengine.assets import demo_model_path

    return str(demo_model_path())


def test_beam_searches_do_not_use_drafts():
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found = []
    for engine in (make_engine(checkpoint("qwen3")), drafting_engine()):
        search = BeamSearch(params, max_tokens=8, eos_token_ids=(), vocab_size=256)
        engine.add_request("b", [5, 6, 7] * 4, search.sampling_params, chooser=search)
        while engine.has_unfinished():
            engine.step()
        found.append([h.token_ids for h in search.hypotheses])
        assert engine.stats().drafted_tokens == 0
    assert found[0] == found[1]


def test_forks_between_steps_and_aborts(tmp_path: Path):
    prompt = [5, 6, 7, 8] * 4
    (expected,) = tokens(run(make_engine(checkpoint("qwen3")), [prompt], greedy(NUM_TOKENS)))[0]
    engine = drafting_engine()
    request = engine.add_request("a", prompt, greedy(NUM_TOKENS))
    engine.add_request("b", prompt, greedy(NUM_TOKENS))
    for _ in range(3):
        engine.step()
    engine.fork("a")
    engine.step()
    engine.abort("b")
    finish(engine)
    assert [seq.output_token_ids for seq in request.sequences] == [expected, expected]
    assert engine.proposer.drafter.fallback.num_tokens == 0, (
        "nothing is kept of requests that have ended"
    )
    assert not engine.proposer._histories


def test_timing_dependent_drafting_changes_no_token():
    """Whether drafts are made depends on measured times; the tokens do not."""
    engine = make_engine(checkpoint("qwen3"), speculative="ngram")
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts(), greedy(NUM_TOKENS)))
    for _ in range(2):
        assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == expected
