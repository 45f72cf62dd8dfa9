"""What a trace holds, what its reader refuses, and what a fold over it rebuilds.

The random lives of tests/core/test_engine_machine.py hold the fold to the engine step by step; here
are the cases that these don't have, and what a file may be.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.assets import demo_model_path
from nanoengine.build import build_engine
from nanoengine.core.sequence import Request, SequenceMoves
from nanoengine.errors import ConfigError, TraceError
from nanoengine.observe.trace import trace_engine
from nanoengine.observe.trace_fold import Fold
from nanoengine.observe.trace_reader import read_trace
from nanoengine.parallel.replicas import local_replicas
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run, run_late

SAMPLE = Path(__file__).parent / "sample.trace.gz"
"""A run of the demo model that has it all: shared prefixes, forks, copies, preemptions, a tier."""


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def last_state(path: Path) -> Fold:
    """The fold after the last line."""
    recording = read_trace(path)
    fold = Fold(recording.header, recording.state)
    for _, fold, _ in Fold.follow(recording):  # noqa: B007
        pass
    return fold


def test_a_decode_writes_little_more_than_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=65, max_num_seqs=16, max_num_batched_tokens=64)
    trace_engine(engine, path)
    for number in range(16):
        engine.add_request(str(number), [number, 7], greedy(8))
    run(engine)
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (plain,) = (set(line) for line in lines if line.get("step") == 4)
    assert plain == {"step", "t", "ms", "waiting", "running", "sampled"}
    (line,) = (line for line in lines if line.get("step") == 4)
    assert len(line["sampled"]) == 16 and all(isinstance(token, int) for token in line["sampled"])


def test_requests_are_told_with_their_arrival_and_their_end(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=33, max_num_seqs=1)
    trace_engine(engine, path)
    engine.add_request("first", [1, 2, 3], greedy(3))
    engine.add_request("second", [4, 5], greedy(2, n=1), priority=2)
    engine.step()
    engine.add_request("gone", [6], greedy(5))
    engine.abort("gone")  # it has waited, so no plan and no commit tells of it
    run(engine)
    engine.close()
    recording = read_trace(path)
    arrived = [one for step in recording.steps for one in step.arrived]
    assert [(one.request_id, one.num_prompt_tokens, one.max_tokens) for one in arrived] == [
        ("first", 3, 3), ("second", 2, 2), ("gone", 1, 5)
    ]  # fmt: skip
    assert [one.priority for one in arrived] == [0, 2, 0]
    assert 0 < arrived[0].time_s < arrived[2].time_s < recording.steps[-1].time_s
    assert recording.end is not None
    ended = [one for step in recording.steps for one in step.ended] + recording.end.ended
    assert [(one.seq_id, one.reason, one.num_output_tokens) for one in ended] == [
        (0, "length", 3), (1, "length", 2), (2, "abort", 0)
    ]  # fmt: skip
    assert recording.steps[0].waits == [(1, "row")] == recording.steps[1].waits


def test_what_the_first_of_the_queue_lacks(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=9, max_num_seqs=3, chunked_prefill=False)
    trace_engine(engine, path)
    for name, length in (("a", 60), ("b", 20), ("c", 8)):
        prompt = [(length + i) % 40 for i in range(length // 2)]
        engine.add_request(name, prompt, greedy(2))
    engine.step()
    run(engine)
    engine.close()
    steps = read_trace(path).steps
    assert steps[0].waits == [(1, "blocks"), (2, "blocks")]
    assert steps[-1].waits == []


class Second:
    """Forks once, then drops the fork: what a beam search does to tokens."""

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        first, *others = (seq for seq in request.sequences if not seq.is_finished)
        assert first.extras.choices is not None
        tokens = [choice.token_id for choice in first.extras.choices]
        if first.num_output_tokens == 1:
            moves.fork(first, tokens[1])
        for other in others:
            assert other.extras.choices is not None
            if first.num_output_tokens == 6 and other.index == 1:
                moves.drop(other)
            else:
                moves.append_token(other, other.extras.choices[1].token_id)
        if first.num_output_tokens == 4:
            moves.fork(first, tokens[2])
        moves.append_token(first, tokens[0])


@pytest.mark.parametrize("loop", [run, run_late])
def test_tokens_that_a_chooser_decides(tmp_path: Path, loop: Any) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=33, max_num_seqs=4)
    trace_engine(engine, path)
    params = greedy(9, logprobs=4)
    request = engine.add_request("beam", [1, 2, 3, 4, 5], params, chooser=Second())
    other = engine.add_request("other", [7, 8], greedy(5))
    loop(engine)
    engine.close()
    fold = last_state(path)
    assert len(request.sequences) == 2
    for seq in [*request.sequences, *other.sequences]:
        assert fold.sequences[seq.seq_id].output_token_ids == seq.output_token_ids, seq


def test_a_trace_may_begin_amid_a_run_and_end_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=65)
    trace_engine(engine, path, steps=(3, 6))
    requests = [engine.add_request(str(i), [i, 7, 8, 9, 9], greedy(12)) for i in range(3)]
    run(engine)
    engine.close()
    recording = read_trace(path)
    assert recording.state is not None and not recording.is_torn
    assert [step.step for step in recording.steps] == [3, 4, 5]
    fold = last_state(path)
    for request in requests:
        (seq,) = request.sequences
        assert fold.sequences[seq.seq_id].output_token_ids == seq.output_token_ids[:6]
    assert engine.scheduler.block_manager.pool.observers == []


def test_a_disk_that_takes_no_more_ends_the_trace_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(num_blocks=129)
    trace_engine(engine, "/dev/full")
    request = engine.add_request("a", [1, 2, 3], greedy(400))
    run(engine)
    engine.close()
    assert len(request.sequences[0].output_token_ids) == 400
    assert "the trace /dev/full ends here" in caplog.text


def test_a_model_is_traced_from_its_options_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.gz"
    with LLM(str(demo_model_path()), trace=path, kv_cache_gib=0.01, max_num_seqs=2) as llm:
        outputs = llm.generate(["The dog", "The sun", "A"], greedy(6), use_tqdm=False)
    recording = read_trace(path)
    assert not recording.is_torn
    assert recording.header.model["attention_backend"] == "cpu"
    assert recording.header.config["max_num_seqs"] == 2
    assert all(step.times.forward_s > 0 for step in recording.steps)
    fold = last_state(path)
    told = {seq.request_id: seq.output_token_ids for seq in fold.sequences.values()}
    assert told == {one.request_id: list(one.outputs[0].token_ids) for one in outputs}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"trace_steps": "1:2"}, "give trace, a file, too"),
        ({"trace": "t", "trace_steps": "5"}, "trace_steps must be A:B, got '5'"),
        ({"trace": "t", "trace_steps": "-1:2"}, "trace_steps must be A:B, got '-1:2'"),
        ({"trace": "t", "trace_steps": "2:x"}, "trace_steps must be A:B, got '2:x'"),
        ({"trace": "t", "trace_steps": "3:3"}, "trace_steps must end behind its beginning"),
    ],
)
def test_steps_to_trace_are_checked(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(model="m", **options)


def test_steps_to_trace() -> None:
    for text, steps in ((None, (0, None)), ("5:", (5, None)), (":7", (0, 7)), ("5:7", (5, 7))):
        assert EngineConfig(model="m", trace="t", trace_steps=text).steps_traced() == steps


def test_a_trace_is_of_one_engine_and_its_directory_is_there() -> None:
    with pytest.raises(ConfigError, match="a trace is of one engine"):
        local_replicas({"model": "m", "device": "cpu", "trace": "t"}, 2)
    with pytest.raises(ConfigError, match="its directory must be there"):
        build_engine(EngineConfig(model=str(demo_model_path()), trace="/no/such/place/t"))


# --- files ----------------------------------------------------------------------------------------


def test_the_sample_has_it_all() -> None:
    recording = read_trace(SAMPLE)
    seen = dict.fromkeys(("taken", "revived", "shared", "freed", "hashed", "evicted", "copied"), 0)
    for _, fold, events in Fold.follow(recording):
        for name in seen:
            seen[name] += len(getattr(events, name))
        counts = [0] * recording.header.num_blocks
        for seq in fold.running.values():
            for table in seq.block_tables:
                for block_id in table:
                    counts[block_id] += 1
        assert fold.refs == counts
    assert min(seen.values()) > 0, seen
    kinds = {move.kind for step in recording.steps for move in step.moved}
    assert kinds == {"load", "store"}
    assert any(step.preempted for step in recording.steps)
    assert any(step.forked for step in recording.steps)
    assert not recording.is_torn


@pytest.mark.parametrize("packed", [False, True])
def test_a_torn_file_is_read_up_to_where_it_breaks_off(tmp_path: Path, packed: bool) -> None:
    whole = gzip.decompress(SAMPLE.read_bytes())
    steps = read_trace(SAMPLE).steps
    header = len(whole.splitlines(keepends=True)[0])
    path = tmp_path / "torn"
    for length in range(header + 1, len(whole) - 1, 3001):
        cut = whole[:length]
        path.write_bytes(gzip.compress(cut)[:-9] if packed else cut)
        recording = read_trace(path)
        assert recording.is_torn
        num_whole = cut.count(b"\n") - 1
        if packed:  # Why: how much of the last line can be unpacked is zlib's business.
            assert recording.steps == steps[: len(recording.steps)]
        else:
            assert recording.steps == steps[: min(num_whole, len(steps))]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"hello\n", "no trace of nanoengine"),
        (b'{"a": 1}\n', "no trace of nanoengine"),
        (b"[" * 100_000, "no trace of nanoengine"),
        (b"\xff\xfe\n", "no trace of nanoengine"),
        (b'{"trace":"2.3","engine":"9.0"}\n', "version 2.3, written by nanoengine 9.0"),
        (None, "can't be read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "file"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=why):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampled", [1, 2, 3, 4, 5, 6, 7]),
        ("sampled", ["<script>"] * 5),
        ("rows", "01234"),
        ("counts", [[99, 1]]),
        ("step", None),
        ("ms", [1.0]),
        ("t", float("nan")),
        ("ms", [float("inf")] * 6),
        ("tables", [[0, 0, [1]]]),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, name: str, value: Any) -> None:
    lines = gzip.decompress(SAMPLE.read_bytes()).splitlines(keepends=True)
    told = [json.loads(line) for line in lines]
    number = next(i for i, line in enumerate(told) if len(line.get("sampled", ())) == 5)
    lines[number] = json.dumps({**told[number], name: value}).encode() + b"\n"
    path = tmp_path / "damaged.trace"
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError, match=f"line {number + 1}, is damaged"):
        read_trace(path)


@pytest.mark.parametrize("place", [0, 3])
def test_two_traces_in_one_file_and_a_step_that_comes_twice(tmp_path: Path, place: int) -> None:
    lines = gzip.decompress(SAMPLE.read_bytes()).splitlines(keepends=True)
    path = tmp_path / "two.trace"
    path.write_bytes(b"".join([*lines[:5], *lines[place:]]))
    with pytest.raises(TraceError, match=r"line 6, is damaged: ValueError: (another|step 2 comes)"):
        read_trace(path)


def test_a_step_that_names_a_block_that_there_is_not(tmp_path: Path) -> None:
    lines = gzip.decompress(SAMPLE.read_bytes()).splitlines()
    first = json.loads(lines[1])
    first["tables"][0][3] = [10**6]
    path = tmp_path / "damaged.trace"
    path.write_bytes(b"\n".join([lines[0], json.dumps(first).encode()]))
    recording = read_trace(path)
    with pytest.raises(TraceError, match="step 0 names a row, group or block"):
        Fold(recording.header).step(recording.steps[0])
