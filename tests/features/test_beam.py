"""Beam search: against transformers on tiny models, against itself on the fake executor."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from nanoengine.errors import RequestError
from nanoengine.features.beam import BeamSearch, BeamSearchParams
from nanoengine.llm import LLM
from nanoengine.settings.params import SamplingParams
from tests.support.engines import checkpoint, random_prompts, reference
from tests.support.fake_executor import (
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    expected_output,
    make_engine,
    run,
    run_late,
)

# --- against transformers -------------------------------------------------------------------------

NUM_TOKENS = 14
LENGTHS = [3, 16, 21, 40]


def make_llm(**options: object) -> LLM:
    options = {"num_kv_blocks": 200, "block_size": 8} | options
    return LLM(
        checkpoint("qwen3"), dtype="float64", attention_backend="naive", debug_checks=True,
        skip_tokenizer_init=True, max_model_len=128, **options,
    )  # fmt: skip


def run_searches(llm: LLM, params: BeamSearchParams, eos: tuple[int, ...]) -> list:
    """Returns (tokens, score, sum) of each sequence of each prompt."""
    engine = llm.engine
    engine.info = engine.checker.info = dataclasses.replace(engine.info, eos_token_ids=eos)
    outputs = llm.beam_search(random_prompts(4, LENGTHS), params, use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert not [output.error for output in outputs if output.error]
    return [[(s.token_ids, s.score) for s in output.sequences] for output in outputs]


def expected(params: BeamSearchParams, eos: tuple[int, ...]) -> list:
    """Returns the same from transformers."""
    model = reference(checkpoint("qwen3"), torch.float64)
    results = []
    for prompt in random_prompts(4, LENGTHS):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=list(eos) or None,
            pad_token_id=None if not eos else eos[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = []
        scores = out.sequences_scores.tolist()
        for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), scores, strict=True):
            end = next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))
            sequences.append((tokens[:end], score))
        results.append(sequences)
    return results


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as beam_llm:
        yield beam_llm


@pytest.fixture(scope="module")
def likely_tokens(llm: LLM) -> list[int]:
    """Returns the most frequent tokens in searches without EOS: they make good EOS ids."""
    sequences = run_searches(llm, BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS), ())
    counts = Counter(t for beams in sequences for tokens, _ in beams for t in tokens[2:])
    return [token_id for token_id, _ in counts.most_common(6)]


@pytest.mark.parametrize(
    ("width", "penalty", "early", "num_eos"),
    [
        (2, 1.0, False, 1),
        (2, 1.0, True, 2),
        (2, 0.0, "never", 4),
        (3, -0.7, False, 1),
        (3, 2.0, "never", 2),
        (3, 0.6, False, 4),
        (4, 1.5, True, 3),
        (4, 1.0, False, 2),
        (5, 1.0, "never", 4),
        (5, 0.0, True, 2),
        (3, 1.0, False, 0),
    ],
)
def test_sequences_and_scores_equal_transformers(
    llm, likely_tokens, width, penalty, early, num_eos
):
    params = BeamSearchParams(
        beam_width=width, max_tokens=NUM_TOKENS, length_penalty=penalty, early_stopping=early
    )
    eos = tuple(likely_tokens[:num_eos])
    ours, theirs = run_searches(llm, params, eos), expected(params, eos)
    assert [[tokens for tokens, _ in beams] for beams in ours] == [
        [tokens for tokens, _ in beams] for beams in theirs
    ]
    for beams, reference_beams in zip(ours, theirs, strict=True):
        assert [s for _, s in beams] == pytest.approx([s for _, s in reference_beams], abs=1e-4)
    if penalty <= 1 and eos:  # with a larger penalty, the longest sequence scores best
        assert any(tokens[-1] in eos for beams in ours for tokens, _ in beams), "no beam ended"
        " with EOS"


def test_a_beam_of_width_1_is_the_greedy_sequence(llm, likely_tokens):
    params = BeamSearchParams(beam_width=1, max_tokens=NUM_TOKENS)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    ours = run_searches(llm, params, tuple(likely_tokens[:2]))
    outputs = llm.generate(random_prompts(4, LENGTHS), greedy, use_tqdm=False)
    assert [tokens for ((tokens, _),) in ours] == [o.outputs[0].token_ids for o in outputs]


def test_ignored_eos_ids_end_no_beam(llm, likely_tokens):
    params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain = dataclasses.replace(params, ignore_eos=False)
    assert run_searches(llm, params, tuple(likely_tokens)) == run_searches(llm, plain, ())


# --- on the fake executor: other requests do not change a search ----------------------------------


def add_search(engine, name: str, prompt: list[int], params: BeamSearchParams):
    search = BeamSearch(
        params, max_tokens=params.max_tokens, eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE
    )
    request = engine.add_request(name, prompt, search.sampling_params, chooser=search)
    return search, request


def search_alone(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Returns tokens and scores of a search that has a large pool to itself."""
    engine = make_engine(num_blocks=200)
    search, _ = add_search(engine, "alone", prompt, params)
    run(engine)
    return [(found.token_ids, found.score) for found in search.hypotheses]


PARAMS = BeamSearchParams(beam_width=3, max_tokens=12)
POOLS = {
    "large": {},
    "small": {"num_blocks": 14},
    "one beam": {"num_blocks": 8},
    "few rows": {"max_num_seqs": 2},
    "one row": {"max_num_seqs": 1},
    "no cache": {"num_blocks": 14, "enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 8, "long_prefill_threshold": 3},
    "windows": {"num_blocks": 25, "windows": (None, 5)},
}


@pytest.mark.parametrize("loop", [run, run_late])
@pytest.mark.parametrize("pool", POOLS)
def test_concurrent_searches_have_the_results_of_single_searches(pool, loop):
    engine = make_engine(**POOLS[pool])
    prompts = [list(range(1, 2 + 3 * i)) for i in range(5)]
    searches = [add_search(engine, f"{i}", prompt, PARAMS) for i, prompt in enumerate(prompts)]
    plain = engine.add_request("plain", range(1, 9), SamplingParams(max_tokens=9, ignore_eos=True))
    assert sorted(loop(engine)) == ["0", "1", "2", "3", "4", "plain"]
    for prompt, (search, request) in zip(prompts, searches, strict=True):
        assert request.error is None
        found = [(one.token_ids, one.score) for one in search.hypotheses]
        assert found == search_alone(prompt, PARAMS)
    (seq,) = plain.sequences
    assert seq.output_token_ids == expected_output(list(range(1, 9)), seq.seed, 9, ())
    assert engine.scheduler.block_manager.pool.counts()["active"] == 0
    if pool in ("small", "one beam", "few rows", "one row", "no cache"):
        assert engine.stats().preemptions > 0, "there were no preemptions"


def test_beams_share_the_blocks_of_their_common_prefix():
    engine = make_engine(num_blocks=200)
    params = dataclasses.replace(PARAMS, max_tokens=8)
    add_search(engine, "a", list(range(1, 31)), params)
    engine.step()
    assert engine.stats().active_blocks == 8
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    run(engine)
    assert [plan.num_tokens for plan in executor.plans] == [30, *[3] * 7]
    assert executor.plans[1].forks, "beams are forked, not admitted"
    assert sum(len(plan.admitted) for plan in executor.plans) == 1
    # Two beams copy the block of tokens 28 to 30; a beam that no longer shares it writes in place.
    assert len(executor.plans[1].block_copies) == 2


def test_a_failing_beam_ends_only_its_own_search():
    engine = make_engine()
    _, bad = add_search(engine, "bad", [1, 2, 3], PARAMS)
    good, _ = add_search(engine, "good", [4, 5], PARAMS)
    for _ in range(3):
        engine.step()
    broken = bad.sequences[-1].seq_id
    engine.executor.row_errors = lambda row: "NaN" if row.seq_id == broken else None
    assert sorted(run(engine)) == ["bad", "good"]
    assert bad.error == "NaN"
    assert [seq.finish_reason for seq in bad.sequences] == ["error"] * 3
    assert [(h.token_ids, h.score) for h in good.hypotheses] == search_alone([4, 5], PARAMS)
    assert engine.stats().active_blocks == 0


def test_an_aborted_search_frees_its_blocks():
    engine = make_engine(num_blocks=14, max_num_seqs=4)
    add_search(engine, "a", list(range(1, 14)), PARAMS)
    add_search(engine, "b", list(range(1, 9)), PARAMS)
    for _ in range(4):
        engine.step()
    assert engine.abort("a") is not None
    assert run(engine) == ["b"]
    engine.add_request("c", [1], SamplingParams(max_tokens=2))
    engine.abort_all()
    assert engine.stats().active_blocks == 0
    assert not engine.scheduler.has_unfinished


def test_a_search_too_large_for_the_pool_ends_with_an_error():
    engine = make_engine(num_blocks=5)
    _, request = add_search(engine, "a", list(range(1, 13)), PARAMS)
    assert run(engine) == ["a"]
    assert request.error is not None
    assert "raise num_kv_blocks" in request.error
    assert all(seq.finish_reason in ("error", "stop") for seq in request.sequences)
    assert engine.stats().active_blocks == 0


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"beam_width": True}, "beam_width must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"length_penalty": 31.0}, "length_penalty must be from -30 to 30, got 31.0"),
        ({"length_penalty": -1e3}, "length_penalty must be from -30 to 30, got -1000.0"),
        ({"early_stopping": 1}, "early_stopping must be True, False or 'never', got 1"),
        ({"temperature": 0.7}, "temperature must be 0, got 0.7"),
        ({"ignore_eos": None}, "ignore_eos must be True or False"),
    ],
)
def test_invalid_beam_parameters_raise(changes, message):
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | changes)


def test_calls_that_cannot_run_raise_before_any_step(llm):
    with pytest.raises(RequestError, match="max_num_seqs=256 must be at least beam_width=257"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=257, max_tokens=2))
    with pytest.raises(RequestError, match="prompt 1"):
        llm.beam_search([[1], [10**6]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert llm.stats().num_running == 0


def test_the_context_of_the_model_limits_a_search(llm):
    (output,) = llm.beam_search(
        [[5] * 125], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True), use_tqdm=False
    )
    assert [len(s.token_ids) for s in output.sequences] == [3, 3]
    assert [s.finish_reason for s in output.sequences] == ["length", "length"]
    assert [s.text for s in output.sequences] == ["", ""]
    sums = [s.cumulative_logprob / 3 for s in output.sequences]
    assert sums == pytest.approx([s.score for s in output.sequences])
