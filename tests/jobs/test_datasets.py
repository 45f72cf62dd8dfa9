"""`LLM.generate_dataset`: it returns the type of its input, with the answers as columns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, ConfigError, RequestError, SamplingParams
from tests.support.batch_jobs import CONFIG
from tests.support.fake_llm import ANSWERS, MakeLLM

ROWS = [{"prompt": "one", "id": 1}, {"prompt": "", "id": 2}, {"prompt": "dog", "id": 3}]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture
def llm(make_llm: MakeLLM, tmp_path: Path) -> Iterator[LLM]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with make_llm(ANSWERS) as llm:
        object.__setattr__(llm.config, "model", str(tmp_path / "model"))
        yield llm


def check(rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in rows] == [1, 2, 3]
    texts = [[output["text"] for output in row["outputs"]] for row in rows]
    assert texts == [[ANSWERS["one"]], [], [ANSWERS["dog"]]]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "empty" in rows[1]["error"]["message"]


def table_of(library: str, rows: list[dict[str, Any]]) -> Any:
    """Builds a table with one of the libraries; skips the test if it is not installed."""
    module = pytest.importorskip(library)
    if library == "pyarrow":
        return module.Table.from_pylist(rows)
    return module.Dataset.from_list(rows) if library == "datasets" else module.DataFrame(rows)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a table of any of the libraries."""
    for name in ("to_pylist", "to_dicts", "to_list"):
        if hasattr(table, name):
            return getattr(table, name)()
    return table.astype(object).where(table.notna(), None).to_dict("records")


LIBRARIES = ["pyarrow", "pandas", "polars", "datasets"]


def test_a_list_returns_a_list_and_a_generator_returns_an_iterator(llm: LLM) -> None:
    found = llm.generate_dataset(ROWS, sampling_params=GREEDY)
    assert isinstance(found, list)
    check(found)
    lazy = llm.generate_dataset(iter(ROWS), sampling_params=GREEDY)
    assert iter(lazy) is lazy
    check(list(lazy))
    (one, ids, raw) = llm.generate_dataset(["one", [5, 6], b"one"], sampling_params=GREEDY)
    assert one["outputs"][0]["text"] == ANSWERS["one"]
    assert ids["prompt_token_ids"] == [5, 6]
    assert raw["error"]["message"] == "prompt must be a string or None, got b'one'"


def test_a_lazy_source_is_pulled_lazily(llm: LLM) -> None:
    pulled = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal pulled
        for i in range(20_000):
            pulled += 1
            yield {"prompt": "one", "id": i}

    found = iter(llm.generate_dataset(rows(), sampling_params=GREEDY))
    assert next(found)["id"] == 0
    assert pulled < 10_000


def test_a_call_with_an_output_resumes(llm: LLM, tmp_path: Path, seen: list[Any]) -> None:
    output = tmp_path / "out.jsonl"
    check(llm.generate_dataset(ROWS, output=output, sampling_params=GREEDY))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[0] + lines[1][:10])
    seen.clear()
    check(llm.generate_dataset(ROWS, output=output, sampling_params=GREEDY))
    assert len(seen) == 2
    with pytest.raises(ConfigError, match=r"rows\.sampling\.temperature"):
        llm.generate_dataset(ROWS, output=output, sampling_params=SamplingParams(temperature=1))
    with pytest.raises(ConfigError, match="its content has changed"):
        llm.generate_dataset(ROWS[:2], output=output, sampling_params=GREEDY)


def test_a_concurrent_call_does_not_replace_the_rows_of_the_first(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was refused only after it had overwritten the first call's rows."""
    output, stream = tmp_path / "out.jsonl", LLM.stream

    def beside(self: LLM, rows: Any, **options: Any) -> Any:
        with pytest.raises(ConfigError, match="being written by another process"):
            llm.generate_dataset(["dog"] * 3, output=output, sampling_params=GREEDY)
        return stream(self, rows, **options)

    monkeypatch.setattr(LLM, "stream", beside)
    check(llm.generate_dataset(ROWS, output=output, sampling_params=GREEDY))
    left = {"out.jsonl", "out.jsonl.job.json", "out.jsonl.rows.jsonl", "model"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_an_error_of_the_source_is_raised_unchanged(llm: LLM, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise FileNotFoundError("the source is gone")

    found = llm.generate_dataset(rows(), output=tmp_path / "out.jsonl", sampling_params=GREEDY)
    with pytest.raises(FileNotFoundError, match="the source is gone"):
        list(found)


def test_a_path_returns_the_path_of_the_output(llm: LLM, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("word,n\none,5\n")
    found = llm.generate_dataset(
        source, output=output, sampling_params=GREEDY, prompt_column="word"
    )
    assert found == output
    assert ANSWERS["one"] in output.read_text()
    with pytest.raises(RequestError, match="give output="):
        llm.generate_dataset(source)


@pytest.mark.extra
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_table_returns_a_table_of_its_type(llm: LLM, library: str) -> None:
    table = table_of(library, ROWS)
    found = llm.generate_dataset(table, sampling_params=GREEDY)
    assert type(found) is type(table)
    check(rows_of(found))
    if library == "datasets":
        lazy = llm.generate_dataset(table.to_iterable_dataset(), sampling_params=GREEDY)
        assert type(lazy) is type(table.to_iterable_dataset())
        check(list(lazy))
        check(list(lazy))  # it may be read again


@pytest.mark.extra
@pytest.mark.parametrize("name", ["outputs", "usage", "error", "_row"])
@pytest.mark.parametrize("library", [*LIBRARIES[:3], None])
def test_columns_with_the_names_of_new_ones_are_replaced(
    llm: LLM, name: str, library: str | None, tmp_path: Path
) -> None:
    rows = [{"prompt": "one", name: "mine"}]
    table = rows if library is None else table_of(library, rows)
    for output in (None, tmp_path / "out.jsonl"):
        found = llm.generate_dataset(table, output=output, sampling_params=GREEDY)
        assert type(found) is type(table)
        (row,) = found if library is None else rows_of(found)
        assert row.keys() == {"prompt", "outputs", "usage", "error", name}
        assert row["outputs"][0]["text"] == ANSWERS["one"]
        assert (row[name] == "mine") == (name == "_row")


@pytest.mark.extra
def test_tables_keep_their_columns_and_types(llm: LLM) -> None:
    """Regression: tables were rebuilt from Python values. Types were guessed, wrongly for bytes and
    maps, after all rows were answered, and an empty table lost its columns."""
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    own = {
        "prompt": pyarrow.array(["one", None]),
        "n": pyarrow.array([1, 2], pyarrow.int8()),
        "bytes": pyarrow.array([b"\xff", b""]),
        "map": pyarrow.array([[("a", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        "error": pyarrow.array(["mine", "mine"]),
    }
    table = pyarrow.table(own)
    for rows in (table, table[:0]):
        found = llm.generate_dataset(rows, template="{{ prompt }}")
        assert found.select(["prompt", "n", "map"]) == rows.select(["prompt", "n", "map"])
        assert found.column_names == ["prompt", "n", "bytes", "map", "outputs", "usage", "error"]
    frame = pandas.DataFrame({"prompt": ["one"], "day": pandas.to_datetime(["2020-01-01"])}, [7])
    frame = frame.astype({"prompt": "category"})
    for part in (frame, frame[:0]):
        found = llm.generate_dataset(part)
        pandas.testing.assert_frame_equal(found[["prompt", "day"]], part)
        assert list(found.columns) == ["prompt", "day", "outputs", "usage", "error"]
    kept = datasets.Dataset(table.select(["prompt", "n"]))
    for part in (kept, kept.select([])):
        found = llm.generate_dataset(part, template="{{ prompt }}")
        assert found.features["n"] == part.features["n"]
        assert found.column_names == ["prompt", "n", "outputs", "usage", "error"]


def test_only_libraries_of_the_caller_are_imported() -> None:
    code = (
        "import sys, nanoengine.jobs.datasets;"
        "print([m for m in ('pandas', 'polars', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_parquet_output_and_nan_values_work(llm: LLM, tmp_path: Path) -> None:
    """Regression: a row with NaN could not be read back, and the table was read as text."""
    pytest.importorskip("pyarrow")
    rows = [{"prompt": "one", "x": float("nan")}, {"prompt": "one", "x": 1.0}]
    found = llm.generate_dataset(rows, output=tmp_path / "out.parquet")
    assert [row["outputs"][0]["text"] for row in found] == [ANSWERS["one"]] * 2
    assert [row["error"] for row in found] == [None, None]
    assert str(found[0]["x"]) == "nan"


@pytest.mark.parametrize("to_file", [False, True])
def test_rows_may_be_numpy_values(llm: LLM, tmp_path: Path, to_file: bool) -> None:
    """Regression: an array of ids ended the call; from a file it was the text "[5 6]"."""
    import numpy as np

    messages = np.array([{"role": "user", "content": "one"}])
    rows = [
        {"prompt_token_ids": np.array([5, 6]), "n": np.int64(1)},
        {"messages": messages, "chat_template": "{{ messages[0].content }}"},
        np.array([5, 6]),
        np.str_("one"),
    ]
    output = tmp_path / "out.jsonl" if to_file else None
    found = llm.generate_dataset(
        rows, output=output, sampling_params=GREEDY, trust_row_templates=True
    )
    assert [row["error"] for row in found] == [None] * 4
    assert found[0]["prompt_token_ids"] is rows[0]["prompt_token_ids"]
    assert found[1]["outputs"][0]["text"] == found[3]["outputs"][0]["text"] == ANSWERS["one"]


def test_columns_need_not_be_json(llm: LLM) -> None:
    """Regression: a column that contains itself ended the call."""
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    rows = [{"prompt": "one", "x": x, 5: x} for x in (loop, deep, object(), {1, 2}, b"\xff")]
    found = llm.generate_dataset(rows, sampling_params=GREEDY)
    assert all(new["x"] is row["x"] and new[5] is row["x"] for new, row in zip(found, rows))  # noqa: B905
    assert [row["outputs"][0]["text"] for row in found] == [ANSWERS["one"]] * 5


class Frame:
    """Iterating over it gives column names. Regression: they were answered as prompts."""

    columns = ("prompt", "id")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def table_with_duplicate_columns(library: str) -> Any:
    """Regression: one of two equal columns was silently dropped, perhaps the prompt."""
    module, names = pytest.importorskip(library), ["prompt", "prompt"]
    if library == "pandas":
        return module.DataFrame([["one", "dog"]], columns=names)
    return module.Table.from_arrays([module.array(["one"]), module.array(["dog"])], names=names)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: 5, {}, "source must be a path, .* got int"),
        (Frame, {}, "source must be a path, .* got Frame"),
        (lambda: ROWS, {"sampling_params": {"n": 2}}, "must be SamplingParams or None, got"),
        pytest.param(
            lambda: table_with_duplicate_columns("pyarrow"),
            {},
            "'prompt' occurs twice",
            marks=pytest.mark.extra,
        ),
        pytest.param(
            lambda: table_with_duplicate_columns("pandas"),
            {},
            "'prompt' occurs twice",
            marks=pytest.mark.extra,
        ),
    ],
)
def test_an_unsupported_source_is_refused(llm: LLM, make, options, message) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate_dataset(make(), **options)


@pytest.mark.extra
def test_missing_values_and_subclasses_of_pandas_frames_are_supported(llm: LLM) -> None:
    """Missing values are NaN there, which no parameter accepts; subclasses yielded column names."""
    pandas = pytest.importorskip("pandas")

    class Mine(pandas.DataFrame):
        pass

    rows = [{"prompt": "one"}, {"prompt": "dog", "top_p": 0.5, "x": 1}, {"top_p": 0.5}]
    frame = Mine(rows)
    found = llm.generate_dataset(frame, sampling_params=GREEDY)
    assert [row is None for row in found["error"]] == [True, True, False]
    assert "needs one of 'prompt'" in found["error"][2]["message"]
    pandas.testing.assert_frame_equal(
        found[["prompt", "top_p", "x"]], frame, check_frame_type=False
    )
