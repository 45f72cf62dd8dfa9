"""Forks between steps: shared blocks, copy-on-write, rows, and invalid forks. FakeExecutor checks
the contents of the blocks slot by slot."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.plan import BlockCopy
from nanoengine.core.sequence import Request, Sequence
from nanoengine.engine import LLMEngine
from nanoengine.errors import RequestError
from nanoengine.llm import LLM
from nanoengine.runner.kv_cache import KVCache
from nanoengine.settings.params import SamplingParams
from tests.support import engines
from tests.support.fake_executor import FakeExecutor, expected_output, make_engine, make_layout, run

PROMPT = list(range(1, 7))


def start(engine: LLMEngine, num_steps: int = 3, **changes: object) -> Request:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | changes)
    request = engine.add_request("a", PROMPT, params)
    for _ in range(num_steps):
        engine.step()
    return request


def executor(engine: LLMEngine) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


def assert_continues(child: Sequence, given: list[int]) -> None:
    """Checks that the child's output starts with `given` and continues with its own seed."""
    max_tokens = child.params.max_tokens or 0
    expected = expected_output(PROMPT, child.seed, max_tokens, child.stop_ids, 0, given)
    assert child.output_token_ids == expected


def test_a_fork_shares_every_block_and_the_first_writer_copies_one():
    engine = make_engine()
    request = start(engine, num_steps=4)
    (parent,) = request.sequences
    given, tables = parent.output_token_ids, [list(table) for table in parent.block_tables]
    children = [engine.fork("a") for _ in range(3)]
    pool = engine.scheduler.block_manager.pool
    assert [child.block_tables for child in children] == [tables] * 3
    assert [pool.blocks[block_id].ref_count for block_id in tables[0]] == [4] * len(tables[0])
    assert executor(engine).num_copies == 0
    engine.step()
    plan = executor(engine).plans[-1]
    assert [fork.seq_id for fork in plan.forks] == [child.seq_id for child in children]
    assert plan.admitted == []
    assert plan.num_tokens == 4, "no token is computed again"
    assert len(plan.block_copies) == 3, "the last of four writers needs no copy"
    assert run(engine) == ["a"]
    for child in children:
        assert_continues(child, given)
    assert len({seq.seed for seq in request.sequences}) == 4
    assert [seq.index for seq in request.sequences] == [0, 1, 2, 3]


def test_a_fork_at_a_block_boundary_copies_nothing():
    engine = make_engine()
    start(engine, num_steps=3)  # 8 tokens are computed: two blocks of 4
    engine.fork("a")
    run(engine)
    assert executor(engine).num_copies == 0


def test_a_replaced_token_may_finish_the_fork_immediately():
    engine = make_engine()
    request = start(engine, stop_token_ids=[49])
    child = engine.fork("a", next_token_id=49)
    assert (child.finish_reason, child.stop_reason) == ("stop", 49)
    assert not request.finished
    assert run(engine) == ["a"]
    assert engine.stats().active_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_waits_if_no_row_is_free(caching):
    engine = make_engine(max_num_seqs=2, enable_prefix_caching=caching)
    request = start(engine)
    given = request.sequences[0].output_token_ids
    children = [engine.fork("a"), engine.fork("a", next_token_id=7)]
    assert [child.status.value for child in children] == ["running", "waiting"]
    run(engine)
    assert_continues(children[0], given)
    assert_continues(children[1], [*given[:-1], 7])
    (again,) = (new for plan in executor(engine).plans[1:] for new in plan.admitted)
    assert again.num_cached_tokens == (8 if caching else 0)


def test_a_fork_leaves_rows_for_pending_forks_of_n():
    engine = make_engine(max_num_seqs=4, long_prefill_threshold=2)
    engine.add_request("n", PROMPT, SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    engine.step()
    first, second = engine.fork("n"), engine.fork("n")
    assert [first.status.value, second.status.value] == ["running", "waiting"]
    assert run(engine) == ["n"]


def test_a_parent_may_be_dropped_before_its_fork_runs():
    engine = make_engine()
    request = start(engine)
    (parent,) = request.sequences
    given = parent.output_token_ids
    child = engine.fork("a")
    engine.scheduler.extras_scheduling.drop(parent)
    engine.step()
    plan = executor(engine).plans[-1]
    (new,) = plan.admitted
    assert (new.seq_id, new.num_cached_tokens, plan.num_tokens) == (child.seq_id, 8, 1)
    run(engine)
    assert request.sequences == [child]
    assert_continues(child, given)


def test_dropping_the_last_unfinished_sequence_ends_the_request():
    engine = make_engine()
    request = start(engine)
    child = engine.fork("a", next_token_id=3)
    engine.scheduler.extras_scheduling.finish(request.sequences[0], "stop")
    engine.scheduler.extras_scheduling.drop(child)
    assert run(engine) == ["a"]


def test_logprobs_of_a_fork_contain_its_replaced_token():
    engine = make_engine()
    request = start(engine, logprobs=3)
    (parent,) = request.sequences
    entry = parent.extras.logprobs[-1][2]
    child = engine.fork("a", next_token_id=entry.token_id)
    assert child.extras.logprobs[-1][0] == entry
    assert len(child.extras.logprobs) == len(parent.extras.logprobs)
    sampled = parent.extras.logprobs[-1][0]
    assert child.extras.cumulative_logprob == pytest.approx(
        parent.extras.cumulative_logprob - sampled.logprob + entry.logprob
    )
    known = [one.token_id for one in parent.extras.logprobs[-1]]
    unknown = next(t for t in range(50) if t not in known)
    with pytest.raises(RequestError, match="no known log-probability"):
        engine.fork("a", next_token_id=unknown)


def test_invalid_forks_raise_with_the_reason():
    engine = make_engine(long_prefill_threshold=3)
    start(engine, num_steps=1)
    for arguments, message in (
        ({"request_id": "b"}, "request 'b' has no unfinished sequence of index 0"),
        ({"request_id": "a", "index": 1}, "request 'a' has no unfinished sequence of index 1"),
        ({"request_id": "a", "next_token_id": 50}, r"next_token_id must be in \[0, 50\), got 50"),
        ({"request_id": "a", "next_token_id": 5}, "replaces the last output token"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.fork(**arguments)
    assert len(engine.scheduler.running) == 1


# --- with a model ---------------------------------------------------------------------------------


def test_a_fork_with_a_replaced_token_equals_a_sequence_that_sampled_it():
    """This includes penalties: their states contain the replaced token, not the sampled one."""
    directory = engines.checkpoint("qwen3")
    prompt = engines.random_prompts(1, [21])[0]
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.8, frequency_penalty=0
    )
    engine = engines.make_engine(directory, block_size=8)
    request = engine.add_request("a", prompt, params)
    for _ in range(4):
        engine.step()
    given = request.sequences[0].output_token_ids
    others = [(given[-1] + 5) % 256, (given[-1] + 9) % 256]
    children = [engine.fork("a", next_token_id=token_id) for token_id in others]
    engines.finish(engine)
    alone = engines.make_engine(directory, block_size=8, enable_prefix_caching=False)
    for child, token_id in zip(children, others, strict=True):
        start = [*given[:-1], token_id]
        rest = SamplingParams(
            temperature=0, max_tokens=20 - len(start), ignore_eos=True, repetition_penalty=1.8
        )
        ((want,),) = engines.tokens(engines.run(alone, [prompt + start], rest))
        assert child.output_token_ids == start + want


def test_streamed_outputs_include_forks_made_during_the_stream():
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        engines.checkpoint("qwen3"), dtype="float64", attention_backend="naive", num_kv_blocks=60,
        max_model_len=128, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        shown: dict[int, list[int]] = {}
        for number, output in enumerate(llm.stream([[5, 6, 7]], params, kind="delta")):
            if number == 1:
                llm.engine.fork(output.request_id)
            for completion in output.outputs:
                shown.setdefault(completion.index, []).extend(completion.token_ids)
    assert len(shown[0]) == 6
    assert shown[1] == shown[0]


def test_a_block_may_be_source_and_target_of_copies_in_one_step():
    """The source of one copy is the target of another. Its last other user was preempted in this
    step, and the block was allocated again."""
    cache = KVCache(
        make_layout(4, 3),
        num_kv_heads=1,
        head_dim=1,
        order="PKD",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.kv += torch.arange(24.0).reshape(cache.kv.shape)
    before = cache.kv.clone()
    cache.copy_blocks([BlockCopy(2, 3), BlockCopy(1, 2)])
    assert torch.equal(cache.kv[:, :, 3], before[:, :, 2])
    assert torch.equal(cache.kv[:, :, 2], before[:, :, 1])
    assert torch.equal(cache.kv[:, :, :2], before[:, :, :2])
