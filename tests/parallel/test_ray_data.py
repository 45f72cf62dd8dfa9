"""Ray Data: two actors, one of them killed, give the results of one process."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch  # noqa: F401  # Why: torch loaded at collection runs on one thread (conftest.py).

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.parallel.ray_data import ERROR_COLUMN, Attempts, Generate
from nanoengine.text.prompt_forms import Row
from tests.support.fake_llm import ANSWERS, LONG, MakeLLM, make_llm_fixture
from tests.support.text_fixtures import byte_level

__all__ = ["make_llm_fixture"]


@pytest.fixture(name="ray")
def ray_fixture() -> Iterator[Any]:
    """Starts Ray on two cores; a busy machine may need several tries."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'nanoengine[ray]'")
    pytest.importorskip("ray.data")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for _ in range(3):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 << 20,
                log_to_driver=False,
            )
            break
        except Exception as error:
            why = f"Ray did not start in three tries: {error}"
            ray.shutdown()
    else:
        pytest.skip(why)
    yield ray
    ray.shutdown()


def rows() -> list[dict[str, Any]]:
    return [
        {"id": f"r{i}", "prompt": "Once upon a time", "max_tokens": 8 + i % 40, "temperature": 0.9}
        for i in range(400)
    ]


def kill_an_actor(killed: list[int]) -> None:
    """Kills an actor that is processing rows."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            try:
                is_actor = "Generate" in "".join(process.cmdline())
            except psutil.Error:
                continue
            for path in Path(tempfile.gettempdir()).glob("nanoengine-*.runs") if is_actor else ():
                text = path.read_text() if path.exists() else ""
                if f'["run", {process.pid}]' in text and text.count('["end"') > 3:
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    return
        time.sleep(0.01)


@pytest.mark.ray
def test_two_actors_one_killed_produce_the_rows_of_one_process(ray: Any) -> None:
    killed: list[int] = []
    thread = threading.Thread(target=kill_an_actor, args=(killed,), daemon=True)
    thread.start()
    options = {"model": str(demo_model_path()), "device": "cpu", "max_num_seqs": 8}
    found = (
        ray.data.from_items(rows(), override_num_blocks=4)
        .map_batches(
            Generate,
            fn_constructor_kwargs={**options, "key_column": "id", "num_kv_blocks": 200},
            batch_size=16,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        .take_all()
    )
    thread.join()
    assert killed
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows())
    assert {row[ERROR_COLUMN] for row in found} == {""}
    with LLM(**options, num_kv_blocks=200) as llm:
        defaults = llm.info.generation_defaults
        given = [
            Row(
                row["prompt"],
                sampling_params=SamplingParams(
                    **{**defaults, "max_tokens": row["max_tokens"], "temperature": 0.9}
                ),
                key=row["id"],
            )
            for row in rows()
        ]
        alone = {output.key: output.outputs[0] for output in llm.generate(given, use_tqdm=False)}
    assert {row["id"]: row["outputs"][0]["text"] for row in found} == {
        key: output.text for key, output in alone.items()
    }


# --- without Ray ----------------------------------------------------------------------------------


def call(generate: Generate, *batches: Any) -> list[Any]:
    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(generate, batches)))

    return asyncio.run(together())


@pytest.fixture(name="runs")
def runs_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "actor.runs"
    monkeypatch.setattr("nanoengine.parallel.ray_data._attempts_path", lambda: path)
    return path


def test_batches_are_returned_complete_in_order_with_their_columns(
    make_llm: MakeLLM, runs: Path
) -> None:
    make_llm(ANSWERS, tokenizer=byte_level()).close()
    generate = Generate("scripted", LONG)
    one = {
        "prompt": np.array(["one", "dog", "€"], object),
        "n": np.array([np.nan, -1, 2]),
        "tag": np.array([1, 2, 3]),
    }
    first, second = call(generate, one, {"prompt": np.array(["dog"], object)})
    assert first["tag"].tolist() == [1, 2, 3]
    assert first["outputs"][0][0]["text"] == ANSWERS["one"]
    assert first["outputs"][1] == []
    assert [bool(error) for error in first[ERROR_COLUMN]] == [False, True, True]
    assert second["outputs"][0][0] == {
        "text": ANSWERS["dog"],
        "token_ids": second["outputs"][0][0]["token_ids"],
        "finish_reason": "stop",
    }
    assert not runs.exists(), "the file is removed after the batch"


def test_a_row_is_an_error_after_its_third_crash_and_others_run(
    make_llm: MakeLLM, runs: Path
) -> None:
    for keys in (("a", "b", "c"), ("b", "c"), ("c",)):
        attempts = Attempts(runs)
        for key in keys:
            attempts.begin(key)
        if len(keys) == 1:
            assert attempts.crashes == {"a": 1, "b": 2, "c": 2}
    make_llm(ANSWERS, tokenizer=byte_level()).close()
    generate = Generate("scripted", LONG, key_column="id")
    batch = {
        "id": np.array(["new", "c", "b", "a"], object),
        "prompt": np.array(["dog", "dog", "one", "dog"], object),
    }
    (found,) = call(generate, batch)
    assert [bool(outputs) for outputs in found["outputs"]] == [True, False, True, True]
    assert found[ERROR_COLUMN][1].startswith("poison: the actor died")
    assert not runs.exists()


def test_an_actor_starts_despite_an_incomplete_line(runs: Path) -> None:
    runs.write_bytes(b'["run", 1]\n["begin", "a"]\n["begin", "b\n["run", 2]\n')
    assert Attempts(runs).crashes == {"a": 1}


@pytest.mark.extra
def test_existing_columns_with_the_same_names_are_replaced(make_llm: MakeLLM, runs: Path) -> None:
    """Regression: a table had two columns with the same name."""
    pyarrow = pytest.importorskip("pyarrow")
    make_llm(ANSWERS, tokenizer=byte_level()).close()
    generate = Generate("scripted", LONG)
    names = ["prompt", "outputs", "usage", ERROR_COLUMN]
    (found,) = call(generate, pyarrow.table({name: ["one"] for name in names}))
    assert found.column_names == names
    assert found["outputs"].to_pylist()[0][0]["text"] == ANSWERS["one"]


def test_rows_that_ended_before_a_crash_are_not_counted(runs: Path) -> None:
    attempts = Attempts(runs)
    attempts.begin("a")
    attempts.begin("b")
    attempts.end("a")
    assert Attempts(runs).crashes == {"b": 1}


def test_keys_are_derived_from_the_rows(make_llm: MakeLLM, runs: Path) -> None:
    make_llm(ANSWERS, tokenizer=byte_level()).close()
    generate = Generate("scripted", SamplingParams(max_tokens=4))
    assert generate._key({"a": 1, "b": 2}) == generate._key({"b": 2, "a": 1})
    assert generate._key({"a": 1}) != generate._key({"a": 2})
