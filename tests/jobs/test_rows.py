"""Lines to tasks: the names of rows, and the options that a row may set."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from nanoengine.jobs import rows as rows_module
from nanoengine.jobs.prefetch import size_of
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import Input, Line
from tests.support.batch_jobs import Batch, chat, completion
from tests.support.text_fixtures import CHAT_TEMPLATE

FILE = Input(name="in.jsonl", form="jsonl")


def task_of(
    row: Any, options: RowOptions | None = None, kind: Any = "simple", number: int = 0
) -> Task:
    line = Line(number, FILE, number + 1, json.dumps(row).encode())
    return RowReader(options or RowOptions()).task(line, kind)


# --- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "x", "id": "a"}, "a"),
        ({"prompt": "x", "id": 17}, "17"),
        ({"prompt": "x", "id": "a", "custom_id": "b"}, "b"),
        ({"prompt": "x", "id": None}, None),
        ({"prompt": "x", "id": ["a"]}, None),
        ({"prompt": "x"}, None),
        ("x", None),
        ([1, 2], None),
    ],
)
def test_a_rows_random_numbers_depend_on_its_id_and_not_on_its_position(
    row: Any, key: str | None
) -> None:
    """Regression: they depended on the row's index, so a reordered file had other answers."""
    assert task_of(row, number=3).key == (key or "3")
    assert task_of(row, number=900).key == (key or "900")


def test_rows_with_a_prompt_column_and_bodies_have_ids_too() -> None:
    row = {"text": "x", "id": "a", "n": 2}
    assert task_of(row, RowOptions(prompt_column="text")).key == "a"
    assert task_of({**chat("b"), "id": "a"}, kind="chat").key == "b"


def test_a_job_with_the_former_seeding_is_not_resumed(batch: Batch) -> None:
    source = batch.write([{"prompt": "one", "id": str(i)} for i in range(3)])
    assert batch.run(source) == 0
    kept = batch.output.read_bytes()
    manifest = batch.output.with_name("out.jsonl.job.json")
    facts = json.loads(manifest.read_text())
    assert facts.pop("random_numbers")
    manifest.write_text(json.dumps(facts))
    batch.output.write_bytes(b"".join(kept.splitlines(keepends=True)[:2]))
    assert batch.run(source) == 2
    assert "random_numbers: it was null, it is " in batch.stderr


# --- content of a row -----------------------------------------------------------------------------


def test_finite_floats_are_copied_exactly() -> None:
    row = {"prompt": "x", "x": [1.5, -0.0, 1.7976931348623157e308, 5e-324, 10**300]}
    assert task_of(row).columns == row


def test_the_cache_of_parameters_is_bounded_by_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: 1,024 params of any size were cached, for example gigabytes of stop strings."""
    monkeypatch.setattr(rows_module, "MAX_CACHE_KEY_CHARS", 1000)
    reader = RowReader(RowOptions())
    for size in (10, 10_000):
        line = Line(0, FILE, 1, json.dumps({"prompt": "x", "stop": ["y" * size]}).encode())
        assert reader.task(line).params == reader.task(line).params
        assert (reader.task(line).params is reader.task(line).params) == (size == 10)
    assert max(map(len, reader._params)) <= 1000


def test_the_size_of_a_row_approximates_its_memory() -> None:
    """Rows wait in a window limited by size. Regression: 64 MB of lines were 400 MB of strings."""
    row = {"prompt": "x", "stop": [f"{i:08}" for i in range(1000)]}
    size = sum(map(sys.getsizeof, [row["stop"], *row["stop"]]))
    for content in (json.dumps(row).encode(), row):
        assert 0.8 * size < size_of(content) < 1.3 * size
    assert size_of(b'"text"') == 6


# --- fields without an effect ---------------------------------------------------------------------


def error_of(row: dict[str, Any], options: RowOptions | None = None, kind: Any = "simple") -> str:
    return str(task_of(row, options, kind).error or "")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"temprature": 0}, "did you mean 'temperature'?"),
        ({"Temperature": 0}, "did you mean 'temperature'?"),
        ({"max_token": 5}, "did you mean 'max_tokens'?"),
        ({"top-k": 5}, "did you mean 'top_k'?"),
        ({"reponse_format": {}}, "did you mean 'response_format'?"),
        ({"max_new_tokens": 5}, "give max_tokens"),
        ({"reasoning_effort": "low"}, "give chat_template_kwargs"),
        ({"functions": [{}]}, "use tools"),
        ({"stream": True}, "batch jobs do not stream"),
        ({"suffix": "x"}, "fill-in-the-middle"),
    ],
)
def test_a_column_that_looks_like_an_option_fails_its_row(
    column: dict[str, Any], message: str
) -> None:
    """Regression: it was copied to the record, and had no effect."""
    error = error_of({"prompt": "x", **column})
    assert f"column {next(iter(column))!r} has no effect: " in error
    assert message in error
    assert "--prompt-column" in error
    assert not error_of({"prompt": "x", **column}, RowOptions(prompt_column="prompt"))


def test_other_columns_are_data() -> None:
    names = "text prompts prompt_id n_tokens num_tokens tool step system message turn stop_reason"
    names += " N functional predictions user metadata topic seeds"
    row = {"prompt": "x", "stream": False, "echo": None, "top_logprobs": None}
    assert not error_of(row | dict.fromkeys(names.split(), 1))


def test_fields_of_openai_work_in_simple_rows() -> None:
    row = {"prompt": "x", "max_completion_tokens": 7, "response_format": {"type": "json_object"}}
    params = task_of(row).params
    assert params.max_tokens == 7
    assert params.structured_outputs is not None and params.structured_outputs.json_object


def test_a_field_outside_of_the_body_is_refused_or_causes_a_warning() -> None:
    error = error_of({**chat("a"), "temperature": 0}, kind="chat")
    assert error == "'temperature' has no effect outside of body: move it into body"
    with pytest.warns(UserWarning, match="outside of body are dropped: 'topic'"):
        assert not error_of({**chat("a"), "topic": 0}, kind="chat")


def test_data_columns_named_like_options_cause_one_warning(batch: Batch) -> None:
    source = batch.write([{"text": "one", "n": 2, "stop": "x"}] * 3)
    assert batch.run(source, "--prompt-column", "text") == 0
    assert batch.stderr.count("columns n, stop set no option") == 1


NOTE = "prompts are sent as chat messages; --raw sends them as they are\n"
ONE = {"messages": [{"role": "user", "content": "one"}]}
SENT: dict[str, tuple[bytes, Any, bool]] = {
    "a.jsonl": (b'"one"\n{"prompt": "one"}', ONE, True),
    "salted.jsonl": (b'{"prompt": "one", "cache_salt": "s"}', {"cache_salt": "s", **ONE}, True),
    "a.txt": (b"one\none", ONE, True),
    "a.csv": (b"prompt\none\none", ONE, True),
    "b.csv --prompt-column text": (b"text\none", ONE, True),
    "b.csv --template {{text}}": (b"text\none", ONE, True),
    "tags.txt": (b"<s>", {"messages": [{"role": "user", "content": "<s>"}]}, True),
    "system.jsonl --system a": (
        b'"one"\n{"turns": ["one"]}',
        {"messages": [{"role": "system", "content": "a"}, *ONE["messages"]]}, True,
    ),
    "rendered.txt": (b"<|user|>one\n" * 2, {"prompt": "<|user|>one"}, True),
    "messages.jsonl": (json.dumps(ONE).encode(), ONE, False),
    "chats.jsonl": (json.dumps(chat("a")).encode(), ONE, False),
    "texts.jsonl": (json.dumps(completion("a")).encode(), {"prompt": "one"}, False),
    "ids.jsonl": (b"[5]", {"prompt_token_ids": [5]}, False),
    "a.jsonl --raw": (b'"one"', {"prompt": "one"}, False),
}  # fmt: skip


@pytest.fixture
def chat_jobs(batch: Batch) -> Batch:
    """Jobs on a model with a chat template."""
    template = batch.directory / "model" / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE, encoding="utf-8")
    return batch


@pytest.mark.parametrize("args", SENT)
def test_prompts_are_sent_as_chat_messages(chat_jobs: Batch, seen: list[Any], args: str) -> None:
    """Regression: answers of chat models to plain prompts were empty or never ended."""
    content, sent, is_noted = SENT[args]
    name, *options = args.split()
    assert chat_jobs.run(chat_jobs.write(content, name), *options) == 0, chat_jobs.stderr
    assert seen
    assert [row.prompt for row in seen] == [sent] * len(seen)
    assert chat_jobs.stderr.count(NOTE) == is_noted
    warning = "prompts with the chat template's <|user|> are sent as with --raw, without --system"
    assert chat_jobs.stderr.count(warning) == (name == "rendered.txt")


def test_a_resumed_job_sends_prompts_in_the_same_form(chat_jobs: Batch) -> None:
    source = chat_jobs.write(["one", "dog"])
    assert chat_jobs.run(source, "--raw") == 0
    assert chat_jobs.run(source) == 2
    difference = "rows.chat: it was false, it is true (whether prompts are sent as chat messages"
    assert difference in chat_jobs.stderr
    assert chat_jobs.run(source, "--raw") == 0


def test_prompts_of_a_model_without_a_template_are_sent_as_they_are(
    batch: Batch, seen: list[Any]
) -> None:
    assert batch.run(batch.write(["one"])) == 0
    assert [row.prompt for row in seen] == [{"prompt": "one"}]
    assert NOTE not in batch.stderr
