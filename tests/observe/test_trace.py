"""Contents of a trace, errors of its reader, and replays that equal the run.

tests/core/test_engine_machine.py compares replays of random runs with engines, state by state. This
file has the cases that those runs lack, and invalid files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanoengine import LLM, DiskTier, HostTier
from nanoengine.assets import demo_model_path
from nanoengine.bench.simulator import make_scheduler
from nanoengine.build import build_engine
from nanoengine.core.checks import check
from nanoengine.core.prefix_tree import Prefix, PrefixTree
from nanoengine.core.sequence import Request, SequenceMoves
from nanoengine.core.tiers.lookup import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError, TraceError
from nanoengine.features.beam import BeamSearchParams
from nanoengine.observe.trace import Trace, trace_engine
from nanoengine.observe.trace_reader import Recording, read_trace
from nanoengine.parallel.replicas import local_replicas
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from tests.observe.make_sample import SAMPLE
from tests.support.fake_disk import FakeDisk, make_tiers
from tests.support.fake_executor import FakeExecutor, make_engine, run, run_late
from tests.support.replayed_trace import ReplayedTrace


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(recording: Recording) -> dict[str, list[list[int]]]:
    """Returns the sampled tokens of each request's sequences."""
    requests: list[Request] = []

    class Listener:
        def on_request(self, request: Request) -> None:
            requests.append(request)

    recording.replay().run(Listener())
    return {r.request_id: [seq.output_token_ids for seq in r.sequences] for r in requests}


def test_the_line_of_a_decode_is_short(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=65, max_num_seqs=16, max_num_batched_tokens=64)
    trace_engine(engine, path)
    for number in range(16):
        engine.add_request(str(number), [number, 7], greedy(8))
    run(engine)
    engine.close()
    (line,) = (line for line in lines_of(path) if line.get("step") == 4)
    assert set(line) == {"step", "t", "s", "sampled"}
    assert len(line["sampled"]) == 16 and all(isinstance(token, int) for token in line["sampled"])
    assert {"plan": 4, "digest": line["step"]}.keys() == lines_of(path)[-7].keys()


def test_calls_are_traced_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(num_blocks=33, max_num_seqs=1)
    trace_engine(engine, path)
    engine.add_request("first", [1, 2, 3], greedy(3))
    engine.add_request("second", [4, 5], greedy(2), priority=2)
    engine.step()
    engine.add_request("gone", [6], greedy(5))
    engine.abort("gone")
    run(engine)
    engine.close()
    _, *lines = lines_of(path)
    kinds = ("add", "plan", "step", "abort", "end")
    assert [next(kind for kind in kinds if kind in line) for line in lines] == [
        "add", "add", "plan", "step", "add", "abort", *["plan", "step"] * 4, "end"
    ]  # fmt: skip
    first, second, gone = (line for line in lines if "add" in line)
    assert (second["id"], second["prompt"], second["most"]) == ("second", [4, 5], 4)
    assert second["priority"] == 2 and "priority" not in first
    assert 0 < first["t"] < lines[3]["t"] < gone["t"]
    assert lines[5] == {"abort": 2}


# --- a replay equals the run ----------------------------------------------------------------------


def traced(**options: Any) -> tuple[LLMEngine, ReplayedTrace]:
    engine = make_engine(**options)
    return engine, ReplayedTrace(engine)


class Second:
    """Forks twice and drops a fork, as a beam search does."""

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
            moves.fork(first, next_token_id=tokens[2])
        moves.append_token(first, tokens[0])


class StopsAt:
    """An `OutputFollower` that finds a stop string at its n-th token."""

    text = "a text"

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def append(self, token_id: int) -> str | None:
        self.num_left -= 1
        return None if self.num_left else "###"

    def finish(self, token_ids: object) -> str:
        return self.text


def add(engine: LLMEngine, name: str, first: int, length: int, count: int, **more: Any) -> Request:
    prompt = [(first + i) % 40 for i in range(length)]
    params = SamplingParams(max_tokens=count, ignore_eos=True, **more.pop("params", {}))
    return engine.add_request(name, prompt, params, **more)


def ask_chosen(engine: LLMEngine) -> list[Request]:
    return [add(engine, "beam", 0, 5, 9, params={"logprobs": 4}, chooser=Second()),
            add(engine, "other", 7, 3, 5)]  # fmt: skip


def ask_stopped(engine: LLMEngine) -> list[Request]:
    many = {"params": {"n": 2, "stop": "###"}, "make_follower": lambda i: StopsAt(4 + 3 * i)}
    return [add(engine, "n", 0, 5, 12, **many),
            add(engine, "one", 9, 5, 12, make_follower=lambda i: StopsAt(3)),
            add(engine, "none", 9, 6, 12, make_follower=lambda i: None)]  # fmt: skip


@pytest.mark.parametrize("loop", [run, run_late])
@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (ask_chosen, {"num_blocks": 33, "max_num_seqs": 4}),
        (ask_stopped, {}),
    ],
)
def test_a_replay_equals_the_run(
    loop: Callable[[LLMEngine], object],
    ask: Callable[[LLMEngine], list[Request]],
    options: dict[str, Any],
) -> None:
    engine, trace = traced(**options)
    requests = ask(engine)
    loop(engine)
    requests += [add(engine, f"again-{i}", 3 * i, 12, 6) for i in range(3)]
    loop(engine)
    assert trace.check(requests) > 7
    if ask is ask_stopped:
        assert [seq.stop_reason for seq in requests[0].sequences] == ["###", "###"]
        assert requests[0].sequences[0].follower.text == "a text"  # type: ignore[union-attr]


def test_calls_between_steps_are_replayed() -> None:
    engine, trace = traced(num_blocks=33)
    requests = [add(engine, str(i), 7 * i, 9, 9) for i in range(3)]
    engine.step()
    engine.step()
    engine.fork("0", next_token_id=11)
    engine.fork("1")
    engine.abort("2")
    run(engine)
    assert engine.reset_prefix_cache()
    requests.append(add(engine, "3", 0, 9, 3))
    run(engine)
    trace.check(requests)


class KeptDisk(FakeDisk):
    """A disk with files that another engine has written."""

    def scan(self, prefixes: PrefixTree) -> list[Content]:
        def known(prefix: Prefix) -> Prefix:
            if prefix.parent is None:
                return prefixes.root_of_digest(prefix.digest)
            return prefixes.extend(known(prefix.parent), prefix.token_ids)

        self.files = {Content(group, known(prefix)): slots
                      for (group, prefix), slots in self.files.items()}  # fmt: skip
        return super().scan(prefixes)


def test_a_disk_tier_with_existing_blocks_is_replayed() -> None:
    """The second engine hits the first one's files, with and without a salt."""
    host: dict[int, list[int | None]] = {}
    files: dict[Any, list[int | None]] = {}
    for _ in range(2):
        disk = KeptDisk(host, Random(3))

        def on_kept_disk(executor: FakeExecutor, disk: FakeDisk = disk) -> TieredPrefixCache:
            executor.host = host
            return make_tiers(executor.layout, disk, num_host_blocks=4)

        disk.files = files
        engine, trace = traced(num_blocks=12, max_num_seqs=2, make_tiers=on_kept_disk)
        requests = [add(engine, str(i), i % 2 * 20, 16, 2, cache_salt=(None, "salt")[i % 2])
                    for i in range(6)]  # fmt: skip
        run(engine)
        trace.check(requests)
        files = disk.files
        assert files
    assert engine.stats().tiers[1].hit_blocks > 0


def test_a_run_of_a_model_is_traced_completely(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.gz"
    tiers = [HostTier(gib=0.001), DiskTier(tmp_path / "disk", gib=0.001)]
    options = {"kv_cache_gib": 0.001, "max_num_seqs": 2, "kv_tiers": tiers, "speculative": "ngram"}
    with LLM(str(demo_model_path()), trace=path, **options) as llm:
        prompts = ["The dog", "The sun", "A"]
        answers = llm.generate(prompts, greedy(6, stop=["e"]), use_tqdm=False)
        found = llm.beam_search(["Tom"], BeamSearchParams(beam_width=2, max_tokens=4))
    recording = read_trace(path)
    assert not recording.is_torn
    assert recording.header["model"]["attention_backend"] == "cpu"
    assert recording.header["config"]["max_num_seqs"] == 2
    assert all(result.times.forward_s > 0 for _, result in recording.replay().steps())
    *sampled, beams = outputs(recording).values()
    assert sampled == [[list(one.outputs[0].token_ids)] for one in answers]
    assert found[0].sequences[0].token_ids[:3] in beams  # with the last one the search ends


def test_only_a_new_engine_can_be_traced(tmp_path: Path) -> None:
    engine = make_engine()
    add(engine, "a", 0, 3, 2)
    with pytest.raises(ConfigError, match="has run 0 steps or has requests: pass trace when"):
        trace_engine(engine, tmp_path / "t")
    run(engine)
    with pytest.raises(ConfigError, match="has run 2 steps"):
        trace_engine(engine, tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("num_tokens", [4, 400])
def test_a_full_disk_ends_the_trace_but_not_the_run(
    caplog: pytest.LogCaptureFixture, num_tokens: int
) -> None:
    engine = make_engine(num_blocks=129)
    trace_engine(engine, "/dev/full")
    request = engine.add_request("a", [1, 2, 3], greedy(num_tokens))
    run(engine)
    engine.close()
    assert len(request.sequences[0].output_token_ids) == num_tokens
    assert "the trace /dev/full ends here" in caplog.text
    caplog.clear()
    Trace("/dev/full", make_scheduler(num_blocks=9, block_size=4), about={"a": "b" * 10_000})
    assert "the trace /dev/full ends here" in caplog.text


def test_traces_of_replicas_and_missing_directories_raise() -> None:
    with pytest.raises(ConfigError, match="a trace can record only one engine"):
        local_replicas({"model": "m", "device": "cpu", "trace": "t"}, 2)
    with pytest.raises(ConfigError, match="its directory does not exist"):
        build_engine(EngineConfig(model=str(demo_model_path()), trace="/no/such/place/t"))


# --- files ----------------------------------------------------------------------------------------


def lines_of_sample() -> list[bytes]:
    return gzip.decompress(SAMPLE.read_bytes()).splitlines(keepends=True)


def changed(path: Path, **values: Any) -> int:
    """Writes the sample with other values in a step of five rows; returns the line's number."""
    lines = lines_of_sample()
    parsed = [json.loads(line) for line in lines]
    number = next(i for i, line in enumerate(parsed) if len(line.get("sampled", ())) == 5)
    lines[number] = json.dumps({**parsed[number], **values}).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    return number + 1


def test_the_sample_has_every_kind_of_event() -> None:
    recording = read_trace(SAMPLE)
    replay = recording.replay()
    seen: set[str] = set()
    for plan, _ in replay.steps():
        check(replay.scheduler)
        seen |= {move.kind for move in plan.transfers}
        seen |= {name for name in ("preempted", "forks", "block_copies") if getattr(plan, name)}
    assert seen == {"load", "store", "preempted", "forks", "block_copies"}
    pool = replay.scheduler.block_manager.pool
    assert pool.num_evicted > 0 and replay.scheduler.stats.preemptions == 35
    assert not recording.is_torn


@pytest.mark.parametrize("packed", [False, True])
def test_an_incomplete_file_is_read_up_to_its_end(tmp_path: Path, packed: bool) -> None:
    whole = b"".join(lines_of_sample())
    lines = read_trace(SAMPLE).lines
    header = len(whole.splitlines(keepends=True)[0])
    path = tmp_path / "torn"
    for length in range(header + 1, len(whole) - 1, 3001):
        cut = whole[:length]
        path.write_bytes(gzip.compress(cut)[:-9] if packed else cut)
        recording = read_trace(path)
        assert recording.is_torn
        assert recording.lines == lines[: len(recording.lines)]
        if not packed:  # Why: zlib decides how much of the last line can be unpacked.
            assert len(recording.lines) - cut.count(b"\n") in (-1, 0)
    assert len([*recording.replay().steps()]) > 200


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"hello\n", "not a nanoengine trace"),
        (b'{"a": 1}\n', "not a nanoengine trace"),
        (b"[" * 100_000, "not a nanoengine trace"),
        (b"\xff\xfe\n", "not a nanoengine trace"),
        (b'{"trace":"2.0","layout":3}\n', "not a nanoengine trace"),
        (b'{"trace":"3.1","engine":"9.0"}\n', "version 3.1, written by nanoengine 9.0"),
        (b'{"trace":"1.0","engine":"0.1"}\n', "reads version 2.x: read it with that nanoengine"),
        (None, "can't be read"),
    ],
)
def test_files_that_are_not_traces_raise(tmp_path: Path, content: bytes | None, why: str) -> None:
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
        ("sampled", 5),
        ("step", 10**6),
        ("step", None),
        ("s", [1.0]),
        ("s", ["x"] * 6),
        ("t", float("nan")),
        ("s", [float("inf")] * 6),
        ("t", None),
        ("errors", [[0]]),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "damaged.trace"
    number = changed(path, **{name: value})
    with pytest.raises(TraceError, match=f"line {number}, is damaged"):
        read_trace(path).replay().run()


def test_unknown_moves_of_a_chooser_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine()
    trace_engine(engine, path)
    ask_chosen(engine)
    run(engine)
    engine.close()
    path.write_text(path.read_text().replace('"drop"', '"__class__"'))
    with pytest.raises(TraceError, match="is damaged: AssertionError: __class__"):
        read_trace(path).replay().run()


def test_an_invalid_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    for name, value in (("layout", {}), ("scheduler", {"admission": "eval"}), ("policy", {"x": 1})):
        header = {**json.loads(lines_of_sample()[0]), name: value}
        path.write_text(json.dumps(header) + "\n")
        with pytest.raises(TraceError, match="line 1, is damaged"):
            read_trace(path).replay()


def test_two_traces_in_one_file_and_repeated_steps_are_damage(tmp_path: Path) -> None:
    path, lines = tmp_path / "two.trace", lines_of_sample()
    path.write_bytes(b"".join([*lines[:5], *lines]))
    with pytest.raises(TraceError, match="line 6, is damaged: another trace begins"):
        read_trace(path)
    at = next(i for i, line in enumerate(lines) if b'"step"' in line)
    path.write_bytes(b"".join([*lines[: at + 1], *lines[at:]]))
    with pytest.raises(TraceError, match=f"line {at + 2}, is damaged"):
        read_trace(path).replay().run()


@pytest.mark.parametrize("step", [0, 30])
def test_a_core_that_plans_differently_raises_at_the_first_different_step(
    tmp_path: Path, step: int
) -> None:
    path = tmp_path / "run.trace"
    lines = [json.loads(line) for line in lines_of_sample()]
    number = next(i for i, line in enumerate(lines) if line.get("plan") == step)
    lines[number]["digest"] ^= 1
    lines[0]["engine"] = "0.0.7"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replay = read_trace(path).replay()
    why = rf"can't be replayed from step {step} on: .* nanoengine 0\.0\.7, which wrote it\. Read it"
    with pytest.raises(TraceError, match=why):
        replay.run()
    assert replay.scheduler.stats.steps == step + 1
