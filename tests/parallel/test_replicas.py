"""Replicas: every row finishes once, as in one process, whichever process crashes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nanoengine.cli import main as cli
from nanoengine.errors import ConfigError, EngineDeadError
from nanoengine.jobs.rows import Task
from nanoengine.jobs.source import Input, RowError
from nanoengine.jobs.work import TooManyErrorsError, Work
from nanoengine.outputs import RequestOutput
from nanoengine.parallel import replicas
from nanoengine.parallel.replicas import Replica, Replicas, local_replicas
from nanoengine.ranks import worker
from nanoengine.text.prompt_forms import PAUSE, Pause, Row
from tests.support import scripted_replica
from tests.support.batch_server import wait_for_lines
from tests.support.checkpoints import make_checkpoint
from tests.support.text_fixtures import byte_level

# Why: most of these tests start processes that load torch.
pytestmark = pytest.mark.guards(
    "nanoengine/parallel/*.py",
    "nanoengine/ranks/*.py",
    "nanoengine/jobs/work.py",
)

ROOT = Path(__file__).parents[2]
SOURCE = Input(name="in.jsonl", form="jsonl")
OPTIONS: dict[str, Any] = {"model": "scripted", "device": "cpu", "max_num_seqs": 8}


@pytest.fixture(name="scripted")
def scripted_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas run the scripted engine instead of a model."""
    monkeypatch.setattr(replicas, "REPLICA", scripted_replica.__name__)


def make_work(prompts: Iterable[str], **options: Any) -> tuple[Work, dict[int, Any]]:
    """Returns a job over these prompts and its records; a second record of a row fails."""
    records: dict[int, Any] = {}

    def finish(task: Task, result: RequestOutput | RowError) -> None:
        assert task.row not in records
        failed = isinstance(result, RowError)
        records[task.row] = result.code if failed else result.outputs[0].text

    tasks = (
        Task(row=i, input=SOURCE, number=i + 1, prompt=prompt, key=f"k{i}")
        for i, prompt in enumerate(prompts)
    )
    return Work(tasks, finish, **options), records


def expected(prompts: Iterable[str]) -> dict[int, str]:
    rows = [Row(prompt, key=f"k{i}") for i, prompt in enumerate(prompts)]
    return {i: scripted_replica.answer(i, row).outputs[0].text for i, row in enumerate(rows)}


def pids(engines: Replicas) -> list[int]:
    return [replica.pid for replica in engines._replicas]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def killer(engines: Replicas, records: dict[int, Any], moments: list[int]) -> threading.Thread:
    """Returns a thread that kills one replica at each of these numbers of records."""

    def kill() -> None:
        for number, moment in enumerate(moments):
            wait_until(lambda: len(records) >= moment)  # noqa: B023
            victim = pids(engines)[number % 2]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: victim not in pids(engines))  # noqa: B023

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.usefixtures("scripted")
@pytest.mark.filterwarnings("ignore:replica")
def test_rows_of_a_killed_replica_finish_once() -> None:
    prompts = [f"p{i}" for i in range(2000)]
    work, records = make_work(prompts)
    with local_replicas(OPTIONS, 2) as engines:
        before = pids(engines)
        thread = killer(engines, records, [50, 700, 1200])
        engines.run(work, len(prompts))
        thread.join()
        assert not set(before) & set(pids(engines)), "all were restarted"
        assert engines.stats().output_tokens >= 1900, "tokens of crashed processes are counted too"
    assert records == expected(prompts)
    assert work.counts.answered == 2000
    assert all(map(is_gone, pids(engines)))


@pytest.mark.usefixtures("scripted")
def test_replicas_wait_for_rows_that_arrive_later() -> None:
    prompts = [f"p{i}" for i in range(60)]
    work, records = make_work(prompts)
    tasks, given, late = work._tasks, itertools.count(), []

    def slowly() -> Iterator[Task | Pause]:
        for task in tasks:
            while next(given) % 3:
                yield PAUSE
            if task.row == 40:  # no row runs, and a consumer waits for outputs
                while len(records) < 40:
                    yield PAUSE
                late.append(len(records))
            yield task

    work._tasks = slowly()
    with local_replicas(OPTIONS, 2) as engines:
        engines.run(work)
    assert records == expected(prompts)
    assert late == [40]


@pytest.mark.usefixtures("scripted")
@pytest.mark.filterwarnings("ignore:replica")
@pytest.mark.parametrize("bad", ["die", "raise"])
def test_the_third_crash_makes_only_its_row_poison(bad: str) -> None:
    prompts = [f"p{i}" for i in range(120)]
    prompts[17] = bad
    work, records = make_work(prompts)
    with local_replicas(OPTIONS, 2) as engines:
        before = pids(engines)
        engines.run(work)
        same = [old == new for old, new in zip(before, pids(engines), strict=True)]
    assert records == {**expected(prompts), 17: "poison"}
    assert (work.counts.answered, work.counts.failed) == (119, 1)
    assert all(same) if bad == "raise" else not all(same)


@pytest.fixture(name="messages")
def messages_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Limits the silence check to stopped replicas, after 0.06 s; yields the list of warnings."""
    check, messages = Replica.check_silence, []

    def check_if_stopped(self: Replica, timeout_s: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                check(self, timeout_s)

    monkeypatch.setattr(Replica, "check_silence", check_if_stopped)
    monkeypatch.setattr(replicas, "REPLICA_TIMEOUT_S", 0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *_, **__: messages.append(message)
        )
        yield messages


@pytest.mark.usefixtures("scripted")
def test_a_hanging_replica_is_killed_and_its_rows_run_elsewhere(messages: list[Any]) -> None:
    """Regression: the job waited for the hanging replica."""
    prompts = [f"p{i}" for i in range(400)]
    work, records = make_work(prompts)
    with local_replicas(OPTIONS, 2) as engines:
        hung = pids(engines)[1]
        os.kill(hung, signal.SIGSTOP)
        engines.run(work)
        assert hung not in pids(engines) and is_gone(hung)
    assert records == expected(prompts)
    assert f"(pid {hung}) has sent nothing for 0.01 s" in str(messages[0])
    assert f"(pid {hung}) was killed: it had sent nothing for 0.06 s" in str(messages[1])
    assert len(messages) == 2


@pytest.mark.usefixtures("scripted")
def test_a_row_that_makes_two_replicas_hang_is_an_error(messages: list[Any]) -> None:
    prompts = [f"p{i}" for i in range(120)]
    prompts[17] = "hang"
    work, records = make_work(prompts)
    with local_replicas(OPTIONS, 2) as engines:
        engines.run(work)
    assert records == {**expected(prompts), 17: "poison"}
    assert sum("was killed" in str(one) for one in messages) == 2


@pytest.mark.usefixtures("scripted")
@pytest.mark.filterwarnings("ignore:replica")
@pytest.mark.parametrize("num_crashes", [2, 3])
def test_a_replica_may_crash_twice_during_its_restart(num_crashes: int, tmp_path: Path) -> None:
    prompts = [f"p{i}" for i in range(60)]
    work, records = make_work(prompts)
    deaths = tmp_path / "deaths"
    deaths.touch()
    with local_replicas({**OPTIONS, "tokenizer": f"DIE_AT_START={deaths}"}, 2) as engines:
        deaths.write_text("dies\n" * num_crashes)
        os.kill(pids(engines)[0], signal.SIGKILL)
        engines.run(work)
        assert [replica.is_lost for replica in engines._replicas] == [num_crashes == 3, False]
        assert records == expected(prompts)
        assert not deaths.read_text()
        if num_crashes == 3:  # the job ends only when all replicas are lost
            deaths.write_text("dies\n" * 3)
            os.kill(pids(engines)[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="all replicas are lost"):
                engines.run(make_work(prompts)[0])


@pytest.mark.usefixtures("scripted")
def test_an_error_of_the_job_ends_all_replicas() -> None:
    work, records = make_work(["p"] * 500, max_errors=0)
    finish = work._finish

    def full(task: Task, result: RequestOutput | RowError) -> None:
        finish(task, result)
        if task.row == 100:
            raise TooManyErrorsError("enough")

    work._finish = full
    with local_replicas(OPTIONS, 2) as engines:
        with pytest.raises(TooManyErrorsError, match="enough"):
            engines.run(work)
        assert len(records) < 500
        wait_until(lambda: all(map(is_gone, pids(engines))))


@pytest.mark.usefixtures("scripted")
def test_few_rows_are_distributed_evenly() -> None:
    work, records = make_work([f"p{i}" for i in range(10)])
    with local_replicas(OPTIONS, 2) as engines:
        engines.run(work, 10)
        tokens = [replica.stats.output_tokens for replica in engines._replicas if replica.stats]
    assert len(records) == 10
    assert max(tokens) <= 9, "one replica could have run all"


@pytest.mark.usefixtures("scripted")
def test_an_error_of_a_replicas_start_is_raised_unchanged() -> None:
    with pytest.raises(ConfigError, match="the script refuses"):
        local_replicas({**OPTIONS, "tokenizer": "refuse"}, 2)


def test_a_crash_while_loading_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PROGRAM", "import os; os.abort()")
    with pytest.raises(EngineDeadError, match="killed by SIGABRT while it started"):
        local_replicas(OPTIONS, 1)


PARENT = """
import time
from nanoengine.parallel import replicas
from nanoengine.ranks import worker
from tests.parallel.test_replicas import OPTIONS, make_work, pids
from tests.support import scripted_replica

replicas.REPLICA = scripted_replica.__name__
engines = replicas.local_replicas(OPTIONS, 2)
print(*pids(engines), flush=True)
endless = (f"p{i}" for i in range(10**9))
engines.run(make_work(endless)[0])
"""


def test_no_replica_outlives_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 2 and not any(map(is_gone, children))
        time.sleep(0.2)
        parent.kill()
    wait_until(lambda: all(map(is_gone, children)))


# --- placement ------------------------------------------------------------------------------------


def test_cores_are_distributed_and_missing_cores_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 6, 7})
    monkeypatch.setattr(replicas, "Worker", lambda _, *cores, environment: ([*cores], environment))
    for count, threads, cores in (
        (2, None, [[0, 1, 2], [3, 6, 7]]),
        (2, 2, [[0, 1], [2, 3]]),
        (7, None, [[0], [1], [2], [3], [6], [7], [0]]),
    ):
        variables = {"OMP_NUM_THREADS": str(len(cores[0]))}
        given = [launch() for launch in replicas._on_cores(count, threads)]
        assert given == [(share, variables) for share in cores]
    with pytest.raises(ConfigError, match="2 replicas of 4 threads need 8 cores"):
        replicas._on_cores(2, 4)


def test_each_replica_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "Worker", lambda _, environment: environment)
    launches = replicas._on_gpus(["4", "5", "GPU-a", "GPU-b"], 2, ranks=2)
    assert [launch() for launch in launches] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
    ]
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs, and this machine has 2"):
        replicas._on_gpus(["0", "1"], 3, ranks=1)
    monkeypatch.setattr(replicas, "_gpus", lambda config: ["0", "1"])
    with pytest.raises(ConfigError, match="--threads-per-replica is only for replicas on a CPU"):
        local_replicas({**OPTIONS, "device": "cuda"}, 2, threads=1)
    with pytest.raises(ConfigError, match="set --device cuda, got 'cuda:1'"):
        local_replicas({**OPTIONS, "device": "cuda:1"}, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--replicas", "0"], "replicas must be at least 1"),
        (["--threads-per-replica", "2"], "needs --replicas"),
    ],
)
def test_invalid_command_lines_raise(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("the\n")
    code = cli.main(["batch", "demo", str(source), "--output", str(tmp_path / "o"), *options])
    assert code == 2
    assert error in capsys.readouterr().err


# --- with a model ---------------------------------------------------------------------------------


def test_two_replicas_one_killed_write_the_records_of_one_process(tmp_path: Path) -> None:
    model, source = tmp_path / "model", tmp_path / "in.jsonl"
    model.mkdir()
    make_checkpoint(model, "llama", vocab_size=len(byte_level().backend))
    byte_level().backend.save_pretrained(model)
    draw = random.Random(0)
    rows: list[Any] = []
    for i in range(300):
        words = draw.choices(["the", "little", "dog", "went", "home"], k=draw.randint(1, 9))
        row: dict[str, Any] = {"prompt": " ".join(words), "max_tokens": draw.randint(1, 24)}
        rows.append(row | ({"temperature": 0.9, "n": 2} if i % 3 else {"temperature": 0}))
    rows[7] = {"prompt": "the", "temprature": 1, "n": -1}
    source.write_text("\n".join(map(json.dumps, rows)))
    engine = ["--device", "cpu", "--attention-backend", "naive", "--num-kv-blocks", "200"]
    engine += ["--kv-cache-dtype", "int8"]
    engine += ["--max-num-seqs", "16", "--max-model-len", "128", "--sort-output"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    victims: list[psutil.Process] = []

    def kill() -> None:
        wait_for_lines(two, 40, os.getpid())
        children = psutil.Process().children()  # includes a process that renders templates
        victims.append(next(c for c in children if "ranks.worker" in " ".join(c.cmdline())))
        victims[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    command = ["batch", str(model), str(source), *engine]
    assert cli.main([*command, "--output", str(two), "--replicas", "2"]) == 1
    thread.join()
    assert victims and all(is_gone(victim.pid) for victim in victims)
    assert cli.main([*command, "--output", str(one)]) == 1
    assert two.read_bytes() == one.read_bytes()
    assert len(one.read_bytes().splitlines()) == 300


def test_a_batch_with_tensor_parallelism_runs_in_a_replica(monkeypatch: Any) -> None:
    from nanoengine.cli import batch

    calls: list[tuple[object, ...]] = []
    engines = SimpleNamespace()
    monkeypatch.setattr(replicas, "local_replicas", lambda *args: calls.append(args) or engines)
    args = batch.BatchArgs(model="demo", inputs=("in",), output="out", tensor_parallel_size=2)
    assert batch._engines(args, {"model": "demo"}) is engines
    assert calls == [({"model": "demo"}, 1, None)]
