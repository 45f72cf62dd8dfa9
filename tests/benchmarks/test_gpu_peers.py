"""The GPU comparison scripts without a GPU: driver, checkpoint, one engine, and the shim."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoengine.bench.workload import random_workload

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_peers"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Makes the scripts import each other as if they ran from their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("common", "run_all", "run_nanoengine", "run_vllm", "make_checkpoint", "fa3"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint that the script writes."""
    directory = tmp_path_factory.mktemp("checkpoint")
    script = str(FOLDER / "make_checkpoint.py")
    subprocess.run([sys.executable, script, str(directory), "--shape", "tiny"], check=True)
    return directory


# --- the driver -----------------------------------------------------------------------------------


def line(label, seconds):
    result = {"label": label, "seconds": seconds, "output_tokens": 100, "copy_gbs": 4000.0}
    return json.dumps(result | {"output_tokens_per_s": 100 / seconds})


def test_engines_alternate_and_a_missing_one_is_reported_once():
    run_all = importlib.import_module("run_all")
    calls, kept = [], []
    speeds = iter([1.0, 4.0, 2.0, 5.0, 3.0, 6.0])

    def start(peer, arguments, limit_s):
        calls.append(peer.label)
        assert arguments == ["--model", "m", "--label", peer.label]
        assert limit_s == 60
        if peer.label == "vllm":
            return '{"label": "vllm", "skipped": "can\'t be imported: No module named vllm"}\n'
        if peer.label == "nano-vllm, FA3":
            return "Traceback: it died\n"
        return f"some noise\n{line(peer.label, next(speeds))}\nmore noise\n"

    labels = ["nanoengine", "nano-vllm", "vllm", "nano-vllm, FA3"]
    peers = [next(p for p in run_all.PEERS if p.label == label) for label in labels]
    results = run_all.run_rounds(peers, 3, ["--model", "m"], 60, kept.append, start)
    order = ["nanoengine", "nano-vllm", "nano-vllm, FA3"]
    assert calls == [*labels, *order, *order]
    assert kept == results
    text = run_all.table(results)
    assert "nanoengine                              100     2.00       50" in text
    assert "33-100" in text
    assert text.count("skipped in round 1: can't be imported: No module named vllm") == 1
    assert text.count("ended without a result") == 3


# --- all scripts ----------------------------------------------------------------------------------


def args_for(checkpoint, label="x", requests=3, longest=8):
    return SimpleNamespace(model=str(checkpoint), label=label, requests=requests, longest=longest)


def test_the_workload_is_the_standard_one():
    common = importlib.import_module("common")
    items = common.workload(256, 1024)
    assert items == list(random_workload())


def test_a_run_warms_up_on_other_ids_and_times_only_the_workload(checkpoint, capsys):
    common = importlib.import_module("common")
    times = iter([0.0, 7.0, 100.0, 104.0])
    seen = []

    def generate(items):
        seen.append([item.prompt_token_ids for item in items])
        return [[1] * item.max_tokens for item in items]

    result = common.run(
        args_for(checkpoint),
        lambda: common.Engine(generate, {"note": "n"}),
        bandwidth=lambda: 4000.0,
        clock=lambda: next(times),
    )
    items = common.workload(3, 8)
    assert result["load_s"] == 7.0
    assert result["seconds"] == 4.0
    assert result["output_tokens"] == sum(item.max_tokens for item in items)
    assert result["output_tokens_per_s"] == result["output_tokens"] / 4.0
    warm_up, timed = seen
    assert [len(ids) for ids in warm_up] == [len(ids) for ids in timed]
    assert all(a[0] != b[0] for a, b in zip(warm_up, timed, strict=True))
    assert max(map(max, timed)) < 4096
    assert json.loads(capsys.readouterr().out) == result


def test_nanoengine_runs_the_checkpoint(checkpoint):
    common = importlib.import_module("common")
    run_nanoengine = importlib.import_module("run_nanoengine")
    pairs = ["device=cpu", "attention_backend=naive", "num_kv_blocks=300", "dtype=bfloat16"]
    options = run_nanoengine.options_of(pairs)
    assert options["num_kv_blocks"] == 300
    result = common.run(
        args_for(checkpoint),
        lambda: run_nanoengine.load(str(checkpoint), options),
        bandwidth=lambda: 1.0,
    )
    assert result["attention"] == "naive"
    assert result["output_tokens_per_s"] > 0
