"""The overlapped loop: a step is launched before the previous one is committed, with equal results.

The first half uses a FakeExecutor that runs a plan only when its result is requested. The second
half uses the real runner, with downloads that arrive as late as possible. test_invisible.py has
the matrix of features, test_core_machines.py random sequences of operations.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoengine import LLM
from nanoengine.assets import demo_model_path
from nanoengine.core.checks import check
from nanoengine.core.plan import AdmittedSequence, StepPlan
from nanoengine.core.speculation import set_drafts
from nanoengine.core.tiers.cost import CostModel, LoadCost
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.errors import ConfigError, RequestError
from nanoengine.features.beam import BeamSearch, BeamSearchParams
from nanoengine.runner.input_batch import InputBatch, SamplingIndices
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from tests.support import engines
from tests.support.engines import checkpoint, greedy, random_prompts, tokens
from tests.support.fake_executor import expected_output, make_engine, run
from tests.support.late_device import LateDownload


def params(max_tokens=20, **changes):
    return SamplingParams(max_tokens=max_tokens, **changes)


class Log:
    """Records the order in which steps are planned, launched and committed."""

    def __init__(self, engine):
        self.events = []
        executor, scheduler = engine.executor, engine.scheduler
        launch, schedule, commit = executor.launch, scheduler.schedule, scheduler.commit

        def logged_schedule():
            plan = schedule()
            self.events.append(f"plan {plan.step}")
            return plan

        def logged_launch(plan):
            self.events.append(f"launch {plan.step}")
            return launch(plan)

        def logged_commit(plan, result):
            self.events.append(f"commit {plan.step}")
            return commit(plan, result)

        executor.launch, scheduler.schedule = logged_launch, logged_schedule
        scheduler.commit = logged_commit


def test_a_step_is_launched_before_the_previous_one_is_committed():
    engine = make_engine(overlap=True)
    log = Log(engine)
    engine.add_request("a", [1, 2, 3], params(3, ignore_eos=True))
    run(engine)
    assert log.events == [
        "plan 0", "launch 0",
        "plan 1", "launch 1", "commit 0",
        "plan 2", "launch 2", "commit 1",
        "plan 3", "launch 3", "commit 2", "commit 3",
    ]  # fmt: skip
    assert engine.executor.plans[3].rows == [], "the step after the last token is empty"
    plain = make_engine()
    log = Log(plain)
    plain.add_request("a", [1, 2, 3], params(2, ignore_eos=True))
    run(plain)
    order = ["plan", "launch", "commit"]
    assert log.events == [f"{event} {step}" for step in range(2) for event in order]


def test_a_token_after_the_end_is_dropped():
    engine = make_engine(overlap=True)
    request = engine.add_request("a", [5], params(60, stop_token_ids=[*range(9)]))
    run(engine)
    (seq,) = request.sequences
    assert seq.finish_reason == "stop"
    assert seq.output_token_ids == expected_output([5], seq.seed, 60, seq.stop_ids)
    steps = [plan for plan in engine.executor.plans if plan.rows]
    assert len(steps) == seq.num_output_tokens + 1, (
        "one step more than tokens, because the last one was already launched"
    )
    assert engine.stats().output_tokens == seq.num_output_tokens
    assert engine.stats().active_blocks == 0
    assert not engine.scheduler.has_unfinished


def max_steps_in_flight(engine):
    """The largest number of steps in flight."""
    run(engine)
    return engine.executor.max_queued


def test_drafts_are_verified_before_the_next_step_is_planned():
    engine = make_engine(overlap=True)
    log = Log(engine)
    request = engine.add_request("a", range(1, 9), params(9, ignore_eos=True))
    engine.step()
    engine.finish_in_flight()
    set_drafts(engine.scheduler, request.sequences[0], (1, 2))
    run(engine)
    index = log.events.index("launch 1")
    assert engine.executor.plans[1].draft_token_ids
    assert log.events[index + 1 : index + 3] == ["commit 1", "plan 2"]


def test_a_chooser_sees_each_step_before_the_next_is_planned():
    engine = make_engine(overlap=True)
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=5),
        max_tokens=5,
        eos_token_ids=(0,),
        vocab_size=50,
    )
    engine.add_request("a", range(1, 9), search.sampling_params, chooser=search)
    assert max_steps_in_flight(engine) == 1
    assert len(search.hypotheses) == 2


def test_forks_of_n_do_not_disable_overlap():
    engine = make_engine(overlap=True)
    for i in range(3):
        engine.add_request(str(i), range(1, 9 + i), params(9, n=2, ignore_eos=True))
    assert max_steps_in_flight(engine) == 2


def test_stores_to_a_tier_do_not_delay_the_next_step():
    cost = CostModel(host=LoadCost(1), disk=LoadCost(1))
    engine = make_engine(
        overlap=True,
        make_tiers=lambda executor: TieredPrefixCache(
            executor.layout, num_host_blocks=40, cost=cost
        ),
    )
    log = Log(engine)
    engine.add_request("a", range(1, 9), params(20, ignore_eos=True))
    run(engine)
    stored = [plan.step for plan in engine.executor.plans if plan.transfers]
    assert len(stored) == 5
    for step in stored:
        assert log.events.index(f"launch {step + 1}") < log.events.index(f"commit {step}")


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("which", [["0"], ["0", "1", "2"]])
def test_an_abort_between_two_steps_leaves_nothing(after, which):
    engine = make_engine(overlap=True, num_blocks=20)
    requests = [
        engine.add_request(str(i), range(1, 9), params(7, n=1 + i % 2, ignore_eos=True))
        for i in range(3)
    ]
    for _ in range(after):
        engine.step()
    for request_id in which:
        assert engine.abort(request_id) is not None
    check(engine.scheduler)
    if len(which) == 3:
        assert not engine.has_unfinished() and not engine.scheduler.has_unfinished
    else:
        assert sorted(run(engine)) == ["1", "2"]
    assert engine.stats().active_blocks == 0
    assert engine.reset_prefix_cache()
    for request in requests:
        for seq in request.sequences:
            expected = expected_output(range(1, 9), seq.seed, 7, ())
            assert seq.output_token_ids == expected[: seq.num_output_tokens]
            assert (seq.finish_reason == "abort") is (request.request_id in which)


def test_abort_all_and_close_with_a_step_in_flight():
    engine = make_engine(overlap=True)
    engine.add_request("a", range(1, 9), params(9, ignore_eos=True))
    engine.step()
    engine.step()
    engine.abort_all()
    assert not engine.has_unfinished() and not engine.scheduler.has_unfinished
    again = engine.add_request("a", range(1, 9), params(5, ignore_eos=True))
    engine.step()
    assert engine.executor.queue, "a step is in flight"
    run(engine)
    (seq,) = again.sequences
    assert seq.output_token_ids == expected_output(range(1, 9), seq.seed, 5, ())
    engine.add_request("b", range(1, 9), params(5))
    engine.step()
    engine.close()
    assert engine.executor.closed


def test_a_fork_requires_that_no_step_is_in_flight():
    engine = make_engine(overlap=True)
    request = engine.add_request("a", range(1, 9), params(6, ignore_eos=True))
    engine.step()
    engine.step()
    with pytest.raises(RequestError, match=r"finish_in_flight\(\)"):
        engine.fork("a")
    engine.finish_in_flight()
    assert request.sequences[0].num_output_tokens == 2
    engine.fork("a", next_token_id=7)
    run(engine)
    first, second = request.sequences
    assert second.output_token_ids[:2] == [first.output_token_ids[0], 7]
    given = second.output_token_ids[:2]
    expected = expected_output(range(1, 9), second.seed, 6, (), given=given)
    assert second.output_token_ids == expected


def test_requests_that_finish_in_flight_are_returned_by_the_next_step():
    engine = make_engine(overlap=True)
    engine.add_request("a", range(1, 9), params(1, ignore_eos=True))
    engine.step()
    engine.finish_in_flight()
    assert engine.has_unfinished() and engine.num_unfinished == 0
    assert [request.request_id for request in engine.step()] == ["a"]
    assert not engine.has_unfinished()


def test_observers_see_each_step_once_and_in_order():
    class Steps:
        def __init__(self):
            self.seen = []

        def on_step(self, plan, result, scheduler):
            assert len(result.token_ids) == len(plan.rows)
            assert result.times.schedule_s > 0 and result.times.commit_s > 0
            self.seen.append(plan.step)

    steps = Steps()
    engine = make_engine(overlap=True, observers=[steps])
    engine.add_request("a", range(1, 20), params(7, ignore_eos=True))
    engine.add_request("b", range(1, 5), params(20))
    run(engine)
    assert steps.seen == list(range(engine.stats().steps))


@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_overlap_is_a_bool_or_none(value):
    with pytest.raises(ConfigError, match="overlap must be True, False or None"):
        EngineConfig(model="m", overlap=value)


def test_overlap_is_off_by_default_on_a_cpu():
    options = {"max_model_len": 64}
    assert not engines.make_engine(checkpoint("qwen3"), **options).overlap
    assert engines.make_engine(checkpoint("qwen3"), overlap=True, **options).overlap


# --- the real runner -----------------------------------------------------------------------------


PROMPTS = random_prompts(7, [1, 7, 16, 33])
FOLLOWING = {
    "penalties": params(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5),
    "min_tokens": params(temperature=0.8, seed=1, min_tokens=9, stop_token_ids=[*range(40, 90)]),
    "bias": params(temperature=0, logit_bias={7: 3.0}, ignore_eos=True),
    "allowed": params(temperature=0.7, seed=2, allowed_token_ids=[*range(30)], n=3),
    "stop": params(temperature=0.9, seed=3, stop_token_ids=[*range(50, 80)]),
    "logprobs": params(temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_processors_and_logprobs_are_the_same_in_both_loops(name):
    options = {"block_size": 8, "num_kv_blocks": 26}
    plain, overlapped = (
        engines.run(
            engines.make_engine(checkpoint("qwen3"), overlap=overlap, **options),
            PROMPTS, FOLLOWING[name],
        )
        for overlap in (False, True)
    )  # fmt: skip
    assert tokens(overlapped) == tokens(plain)
    for one, other in zip(plain, overlapped, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        for first, second in zip(one.sequences, other.sequences, strict=True):
            assert first.finish_reason == second.finish_reason
            assert _logprobs(first) == _logprobs(second)
    if name == "logprobs":
        assert len(plain[3].prompt_logprobs) == 32


def _logprobs(seq):
    return [] if seq.extras is None else seq.extras.logprobs or []


def test_bad_words_see_a_token_that_is_in_flight():
    prompt = PROMPTS[3]
    engine = engines.make_engine(checkpoint("qwen3"))
    ((sampled,),) = tokens(engines.run(engine, [prompt], greedy(6)))
    words = ((sampled[2], sampled[3]),)
    found = []
    for overlap in (False, True):
        engine = engines.make_engine(checkpoint("qwen3"), overlap=overlap)
        engine.add_request("a", prompt, greedy(6), bad_word_ids=words)
        (request,) = _finish_all(engine)
        found.append(request.sequences[0].output_token_ids)
    assert found[0] == found[1]
    assert found[0][:3] == sampled[:3] and found[0][3] != sampled[3]


def _finish_all(engine):
    finished = []
    while engine.has_unfinished():
        finished += engine.step()
    return finished


def test_aborts_during_steps_and_reused_rows():
    """With two rows, the row of an aborted sequence is reused while its step is in flight."""
    expected = {}
    for overlap in (False, True):
        engine = engines.make_engine(
            checkpoint("qwen3"), overlap=overlap, max_num_seqs=2, block_size=8, num_kv_blocks=20
        )
        requests = [
            engine.add_request(str(i), prompt, params(9, temperature=0, repetition_penalty=1.3))
            for i, prompt in enumerate(random_prompts(8, [5, 17, 9]))
        ]
        for step in range(30):
            if step % 4 == 3:
                engine.abort(str(step // 4))
            if engine.has_unfinished():
                engine.step()
        _finish_all(engine)
        check(engine.scheduler)
        assert engine.stats().active_blocks == 0
        for request in requests:
            (seq,) = request.sequences
            if seq.finish_reason == "length":
                known = expected.setdefault(request.request_id, seq.output_token_ids)
                assert seq.output_token_ids == known
    assert expected


def test_tokens_are_stored_only_in_rows_of_their_sequence():
    input_batch = InputBatch(
        max_num_seqs=2, max_model_len=8, block_size=4, num_groups=1, device=torch.device("cpu")
    )
    old = AdmittedSequence(0, 10, [1, 2, 3], 3, 0, params(), 0)
    input_batch.update(StepPlan(step=0, admitted=[old, old._replace(row=1, seq_id=11)]))
    at = np.array([0, 1])
    lines = SamplingIndices(
        entries=at, rows=at, seq_ids=input_batch.seq_ids[at], positions=np.array([3, 3]),
        rows_on_device=torch.from_numpy(at),
    )  # fmt: skip
    new = AdmittedSequence(0, 12, [7, 8, 9, 6], 4, 0, params(), 0)
    input_batch.update(StepPlan(step=1, released=[0], admitted=[new]))
    input_batch.write_host(lines, np.array([50, 51]))
    assert input_batch.token_ids[:, :4].tolist() == [[7, 8, 9, 6], [1, 2, 3, 51]]


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_streams_and_stop_strings_are_the_same_in_both_loops(kind):
    found = []
    for overlap in (False, True):
        with LLM(demo_model_path(), overlap=overlap, attention_backend="naive") as llm:
            if overlap:
                llm.engine.executor.start_download = LateDownload
            outputs = list(
                llm.stream(
                    ["Q: 1 + 2 = ?", "Once upon"],
                    SamplingParams(temperature=0.8, seed=5, max_tokens=24, stop=["e", "1"]),
                    kind=kind,
                )
            )
        texts = {}
        for output in outputs:
            text = output.outputs[0].text
            texts[output.index] = texts.get(output.index, "") + text if kind == "delta" else text
        ends = {o.index: o.outputs[0].finish_reason for o in outputs if o.finished}
        found.append((texts, ends))
    assert found[0] == found[1]
    assert found[0][1].keys() == {0, 1}


def test_an_exception_in_the_runner_leaves_a_usable_engine(monkeypatch):
    options = {"block_size": 8, "num_kv_blocks": 40, "long_prefill_threshold": 4}
    engine = engines.make_engine(checkpoint("qwen3"), overlap=True, **options)
    runner = engine.executor
    expected = tokens(engines.run(engine, PROMPTS, greedy(8)))
    sampler = runner.ensure_step_sampler()
    methods = (runner, "_run"), (sampler.scorer, "score"), (sampler, "expect_tokens")
    for owner, name in methods:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, params(8, temperature=0, prompt_logprobs=0))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                _finish_all(engine)
        assert not engine.has_unfinished() and not engine.scheduler.has_unfinished
        assert tokens(engines.run(engine, PROMPTS, greedy(8))) == expected
