"""`nanoengine batch`: rows of every format as input, records as output, and how a run ends."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from nanoengine.cli import main as cli
from nanoengine.jobs import prefetch
from nanoengine.jobs.job import Job
from nanoengine.jobs.prefetch import Prefetcher
from nanoengine.jobs.progress import Progress, time_left_s
from nanoengine.jobs.record_log import PipeRecordLog
from nanoengine.jobs.records import json_line
from nanoengine.jobs.signals import Stopped
from nanoengine.jobs.source import Input, Line
from nanoengine.text import rendering
from nanoengine.text.prompt_forms import PAUSE
from tests.support.batch_jobs import Batch, chat, completion, row_of
from tests.support.fake_llm import ANSWERS
from tests.support.text_fixtures import CHAT_TEMPLATE

GREEDY = ("--temperature", "0")


def texts(record: dict[str, Any]) -> list[str]:
    if "outputs" in record:
        return [output["text"] for output in record["outputs"]]
    choices = record["response"]["body"]["choices"]
    return [c["message"]["content"] if "message" in c else c["text"] for c in choices]


# --- OpenAI's format ------------------------------------------------------------------------------


def validate(record: dict[str, Any]) -> None:
    """Checks a line of OpenAI's output: an error, or a body that OpenAI's package parses."""
    assert record.keys() == {"id", "custom_id", "response", "error"}
    if record["error"] is not None:
        assert record["response"] is None
        assert {"code", "message", "line", "file"} == record["error"].keys()
        return
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    kind = ChatCompletion if body["object"] == "chat.completion" else Completion
    kind.model_validate(body)


def test_openai_rows_are_answered_in_their_own_format(batch: Batch) -> None:
    rows = [completion("a", "one"), chat("b", "dog"), completion("c", "€", n=1)]
    found = batch.answers(rows)
    for record in found.values():
        validate(record)
    assert [found[i]["custom_id"] for i in range(3)] == ["a", "b", "c"]
    assert texts(found[0]) == [ANSWERS["one"]]
    assert texts(found[2]) == [ANSWERS["€"]]
    usage = found[0]["response"]["body"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 4


def test_openais_example_and_conversations_of_two_turns_run_unchanged(batch: Batch) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    hello = {"role": "user", "content": "Hello world!"}
    body = {"model": "some/other-model", "messages": [system, hello], "max_completion_tokens": 1000}
    url = "/v1/chat/completions"
    rows = [
        {"custom_id": f"request-{i}", "method": "POST", "url": url, "body": body} for i in (1, 2)
    ]
    assert batch.run(batch.write(rows)) == 0, batch.stderr
    assert batch.stderr.count("rows name model 'some/other-model'") == 1
    for record in batch.records():
        validate(record)
    talks = [{"question_id": i, "category": "x", "turns": ["one", "and more"]} for i in range(80)]
    output = batch.directory / "talks.jsonl"
    assert batch.run(batch.write(talks, "talks-in.jsonl"), output=output) == 0
    records = batch.records(output)
    assert sorted(record["question_id"] for record in records) == list(range(80))
    assert all([o["turn"] for o in record["outputs"]] == [0, 1] for record in records)


def test_the_answer_of_a_turn_is_part_of_the_next(batch: Batch, seen: list[Any]) -> None:
    source = batch.write([{"turns": ["hi", "and then"], "temperature": 0}])
    assert batch.run(source, "--chat-template", CHAT_TEMPLATE, "--system", "be kind") == 0
    assert [m["role"] for m in seen[1].prompt["messages"]] == [
        "system", "user", "assistant", "user"
    ]  # fmt: skip
    (record,) = batch.records()
    assert seen[1].prompt["messages"][2]["content"] == record["outputs"][0]["text"]
    assert seen[0].key != seen[1].key


def test_logprobs_have_the_format_of_openai(batch: Batch) -> None:
    rows = [
        chat("a", "one", logprobs=True, top_logprobs=2, max_tokens=3),
        completion("b", "one", logprobs=1, max_tokens=3),
        chat("c", "one", logprobs=True, max_tokens=3),
    ]
    found = batch.answers(rows)
    for record in found.values():
        validate(record)
    first = found[0]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in first] == [2] * len(first)
    assert found[2]["response"]["body"]["choices"][0]["logprobs"]["content"][0]["bytes"]
    assert found[1]["response"]["body"]["choices"][0]["logprobs"]["tokens"]


def test_echo_repeats_the_prompt_with_its_logprobs(batch: Batch) -> None:
    rows = [
        completion("a", "one", echo=True, max_tokens=2),
        completion("b", "one", echo=True, logprobs=1, max_tokens=0),
        completion("c", "one", echo=True, logprobs=1, max_tokens=2),
        completion("d", "one", logprobs=1, prompt_logprobs=1, max_tokens=2),
        completion("e", "one", echo=False, max_tokens=2),
    ]
    found = batch.answers(rows)
    for row in (0, 3, 4):  # The class in openai has no null, which the API returns.
        validate(found[row])
    bodies = [found[i]["response"]["body"] for i in range(len(rows))]
    (plain, alone, both, apart, without) = [body["choices"][0] for body in bodies]
    assert plain["text"] == both["text"] == "one" + without["text"] and alone["text"] == "one"
    prompt, own = bodies[3]["prompt_logprobs"], apart["logprobs"]
    for choice, more in ((alone, 0), (both, 2)):
        logprobs = choice["logprobs"]
        assert logprobs["top_logprobs"] == prompt + own["top_logprobs"][:more]
        values = [None if entry is None else next(iter(entry.values())) for entry in prompt]
        assert logprobs["token_logprobs"] == values + own["token_logprobs"][:more]
        assert "".join(logprobs["tokens"]).startswith("one") and len(prompt) > 1
        assert logprobs["text_offset"][0] == 0
    assert "prompt_logprobs" not in bodies[1] and plain["logprobs"] is None


UNSTORABLE = "is too large for a 64-bit float: write it as a string"
BAD_ROWS: list[tuple[Any, str, str]] = [
    (completion("x", temprature=0), "invalid_row", "did you mean 'temperature'?"),
    (completion("x", stream=True), "invalid_row", "batch jobs do not stream"),
    (completion("x", temperature=-1), "invalid_row", "temperature must be at least 0, got -1"),
    (completion("x", temperature="hot"), "invalid_row", "temperature must be a finite number"),
    (completion("x", max_completion_tokens=3), "invalid_row", "another name of max_tokens"),
    (completion("x", ["a", "b"]), "invalid_row", "prompt must be one prompt, got 2"),
    (completion("x", None), "invalid_row", "prompt must be a string or token ids, got None"),
    (completion("x", "one " * 200), "invalid_request", "max_model_len"),
    (completion("x", [5, 10**6]), "invalid_request", "must be in [0, 401), got 1000000"),
    (completion("x", "\ud800"), "invalid_request", "UTF-8"),
    (completion("x", echo=1), "invalid_row", "echo must be true or false"),
    (completion("x", [5], echo=True), "invalid_row", "needs a prompt that is text"),
    (chat("x", echo=True), "invalid_row", "only rows of /v1/completions may have it"),
    (completion("x", logit_bias={"a": 1}), "invalid_row", "a key of logit_bias must be an integer"),
    (chat("x", logprobs=3), "invalid_row", "logprobs must be true or false in a chat"),
    (chat("x", top_logprobs=3), "invalid_row", "top_logprobs needs logprobs: true"),
    (chat("x", response_format={"type": "xml"}), "invalid_row", "response_format must be"),
    (chat("x", response_format={"type": "json_schema"}), "invalid_row", "response_format must be"),
    (chat("x", guided_json={"type": "object"}), "invalid_row", "use response_format"),
    (chat("x", messages=[]), "invalid_request", "a list of messages"),
    (chat("x", chat_template_kwargs=5), "invalid_request", "chat_template_kwargs"),
    (chat("x", chat_template="one"), "invalid_row", "trust_row_templates (--trust-row-templates)"),
    (chat("x", tools="x"), "invalid_request", "'tools' must be a list"),
    (chat(5), "invalid_row", "custom_id must be a string, got 5"),
    ({**chat("x"), "url": "/v1/images"}, "unknown_url", "url must be one of"),
    ({**chat("x"), "url": None}, "unknown_url", "url must be one of"),
    ({**chat("x"), "method": "GET"}, "invalid_row", "method must be 'POST'"),
    ({**chat("x"), "body": []}, "invalid_row", "body must be an object"),
    (completion("x", n=16_385, temperature=1.0), "invalid_row", "n must be from 1 to 16,384"),
    ([], "invalid_row", "the row must be an object"),
    ("one", "invalid_row", "the row must be an object"),
    (b'{"custom_id": "x", "body": {"n": 1e400}}', "unreadable_row", UNSTORABLE),
    (b'{"custom_id": "x", "body"', "unreadable_row", "not JSON"),
]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
BAD_SIMPLE_ROWS: list[tuple[Any, str, str]] = [
    (b'{"prompt"', "unreadable_row", "the line is not JSON: Expecting ':' delimiter at column 10"),
    (b"[" * 200_000, "unreadable_row", "not JSON"),
    (b"1" * 5000, "unreadable_row", "not JSON"),
    (b'"caf\xe9"', "unreadable_row", "not UTF-8"),
    (b'{"prompt": "one", "x": NaN}', "unreadable_row", "NaN is not a JSON value"),
    (b'{"prompt": "one", "x": -Infinity}', "unreadable_row", "-Infinity is not a JSON value"),
    (b'{"prompt": "one", "x": 1e400}', "unreadable_row", UNSTORABLE),
    (b'{"prompt": "one", "x": [-1E+0999]}', "unreadable_row", UNSTORABLE),
    (b'{"prompt": "one", "x": %s.0}' % (b"9" * 400), "unreadable_row", UNSTORABLE),
    (
        b'{"prompt": "one", "x": %s}' % (b"[" * 600 + b"]" * 600),
        "unreadable_row",
        "100 levels deep",
    ),
    (5, "invalid_request", "must be a string"),
    ({"id": 4}, "invalid_request", "needs one of 'prompt'"),
    ({"messages": IMAGE}, "invalid_request", "'image_url'"),
    ({"prompt": "one", "top_k": -5}, "invalid_row", "top_k must be"),
    ({"prompt": "one", "stop": ["x"] * 1025}, "invalid_row", "stop must have at most 1,024"),
    ({"prompt": "one", "prompt_logprobs_start": 2**70}, "invalid_row", "must be in [0, 2**31)"),
]


@pytest.mark.parametrize(
    ("good", "rows"), [(completion("good"), BAD_ROWS), ("one", BAD_SIMPLE_ROWS)]
)
def test_a_row_that_cannot_run_becomes_an_error_record_and_other_rows_are_answered(
    batch, good, rows
):
    """The file has a byte order mark, CRLF, and blank lines, which are not rows."""
    written = [row if isinstance(row, bytes) else json.dumps(row).encode() for row, _, _ in rows]
    lines = [line for bad in written for line in (json.dumps(good).encode(), bad, b"")]
    found = batch.answers(codecs.BOM_UTF8 + b"\r\n".join(lines), *GREEDY, code=1)
    assert sorted(found) == list(range(2 * len(rows)))
    for i, (row, code, message) in enumerate(rows):
        assert texts(found[2 * i]) == [ANSWERS["one"]]
        record = found[2 * i + 1]
        assert record["error"] is not None, row
        assert (record["error"]["code"], record["error"]["line"]) == (code, 3 * i + 2), record
        assert message in record["error"]["message"]
        if rows is BAD_ROWS:
            validate(record)
            known = row.get("custom_id") if isinstance(row, dict) else None
            assert record["custom_id"] == ("x" if isinstance(row, bytes) else known)


def test_fields_of_a_body_reach_the_engine(batch: Batch, seen: list[Any]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    own = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x", "y"], "seed": 7,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 2.5},
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [3], "response_format": {"type": "text"}, "stream": False,
    }  # fmt: skip
    rows = [
        completion("a", **own),
        chat("b", max_completion_tokens=9, tools=[tool], reasoning_effort="low"),
        chat("c", tools=[tool], tool_choice="none", chat_template_kwargs={"k": 1}),
        completion("d", max_tokens=None),
        completion("e", [[5, 6, 7]], top_k=None),
        completion("f", temprature=5, user="me", metadata={"a": 1}),
    ]
    assert batch.run(batch.write(rows), "--ignore-unknown") == 0, batch.stderr
    given = {row.key: row for row in seen}
    params = given["a"].sampling_params
    for name in own.keys() - {"logit_bias", "stop", "stop_token_ids", "response_format", "stream"}:
        assert getattr(params, name) == own[name], name
    assert params.logit_bias == {5: 2.5}
    assert list(params.stop) == ["x", "y"]
    assert list(params.stop_token_ids) == [3]
    assert given["b"].sampling_params.max_tokens == 9
    assert given["b"].prompt["tools"] == [tool]
    assert given["b"].prompt["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert "tools" not in given["c"].prompt
    assert given["c"].sampling_params.max_tokens is None, "as in OpenAI's API: the whole context"
    assert given["d"].sampling_params.max_tokens == 16, "as in OpenAI's API"
    assert given["e"].prompt == {"prompt_token_ids": [5, 6, 7]}
    assert given["f"].sampling_params.temperature == 0


# --- simple rows and other files ------------------------------------------------------------------


def test_simple_rows_keep_their_columns(batch: Batch) -> None:
    rows = [
        {"prompt": "one", "id": 7, "tags": ["a", {"b": None}], "temperature": 0},
        "dog",
        {"prompt_token_ids": [5, 6], "note": "ü\ud800", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}], "_row": "mine", "outputs": 3},
        [5, 6],
        {"prompt": "one", "priority": -(10**400), "max_tokens": 10**400},
        {"prompt": 5, "id": 4},
    ]
    found = batch.answers(rows, *GREEDY, code=1)
    assert {k: found[0][k] for k in rows[0]} == rows[0]  # type: ignore[union-attr]
    assert (texts(found[0]), texts(found[1])) == ([ANSWERS["one"]], [ANSWERS["dog"]])
    assert found[0]["outputs"][0]["finish_reason"] == "stop"
    assert found[0]["usage"]["prompt_tokens"] >= 1
    assert found[1]["prompt"] == "dog"
    assert found[2]["note"] == "ü\ud800"
    assert found[3]["error"] is None
    assert found[4]["prompt_token_ids"] == [5, 6]
    assert texts(found[5]) == [ANSWERS["one"]], "integers beyond the range of floats are supported"
    assert (found[6]["outputs"], found[6]["id"]) == ([], 4)


def test_text_csv_and_compressed_files_and_a_glob(batch: Batch) -> None:
    batch.write(codecs.BOM_UTF8 + b"one\n\ndog\r\n", "a.txt")
    batch.write(gzip.compress(b'{"prompt": "one"}\n{"prompt": "dog"}\n'), "b.jsonl.gz")
    batch.write(b'id,prompt\n1,one\n2,"dog"\n3,torn,5\n', "c.csv")
    rows = batch.directory / "[abc].*"
    assert batch.run(rows, "--sort-output", *GREEDY) == 1, batch.stderr
    records = batch.records()
    good = [ANSWERS["one"], ANSWERS["dog"]]
    assert [texts(record) for record in records] == [[t] for t in good * 3] + [[]]
    assert (records[4]["id"], records[6]["id"]) == ("1", "3")
    error = records[6]["error"]
    assert (error["code"], error["line"]) == ("unreadable_row", 4)
    assert error["file"].endswith("c.csv")


def test_a_prompt_is_built_from_columns(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"word": "one", "n": 5}, {"word": 3}, {"other": "x"}]
    source = batch.write(rows)
    found = batch.answers(source, "--prompt-column", "word", *GREEDY, code=1)
    assert texts(found[0]) == [ANSWERS["one"]], "a column named n is data"
    assert found[0]["n"] == 5
    assert "column 'word' must be a string, got 3" in found[1]["error"]["message"]
    assert "the row has no column 'word'" in found[2]["error"]["message"]
    found = batch.answers(source, "--template", "{{ word }}", "--restart", *GREEDY, code=1)
    assert texts(found[0]) == [ANSWERS["one"]]
    assert "'word' is undefined" in found[2]["error"]["message"]
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    assert batch.run(source, "--template", evil, "--restart") == 1
    assert "unsafe" in batch.records()[0]["error"]["message"]
    many = "{% for i in range(99999) %}{{ range(99999) | map('string') | join(word) }}{% endfor %}"
    monkeypatch.setattr(rendering, "RENDER_S", 0.3)
    assert batch.run(source, "--template", many, "--restart") == 1
    assert "did not end within 0.3 s" in batch.records()[0]["error"]["message"]


def test_a_chat_template_of_a_row_runs_only_with_trust_row_templates(batch: Batch) -> None:
    user, template = {"role": "user", "content": "one"}, "{{ messages[0].content }}"
    rows = [
        chat("a", chat_template=template),
        chat("b", chat_template="{{ 1 / 0 }}"),
    ]
    simple = batch.write([{"messages": [user], "chat_template": template}], "simple.jsonl")
    sources = [batch.write(rows), simple]
    assert batch.run(*sources, *GREEDY) == 1
    assert all(record["error"] for record in batch.records())
    # the same job: failed rows run again
    assert batch.run(*sources, "--retry-errors", "--trust-row-templates", *GREEDY) == 1, (
        batch.stderr
    )
    found = batch.by_row()
    assert texts(found[0]) == [ANSWERS["one"]]
    assert "the chat template refused" in found[1]["error"]["message"]
    assert texts(found[2]) == [ANSWERS["one"]]


def test_a_damaged_file_yields_its_readable_rows_and_then_an_error_record(batch: Batch) -> None:
    whole = gzip.compress(b'"one"\n' * 5_000)
    source = batch.write(whole[: len(whole) // 2], "a.jsonl.gz")
    other = batch.write(["dog"], "b.jsonl")
    found = batch.answers(source, other, *GREEDY, code=1)
    *_, before, last = sorted(found)
    assert before > 1_000
    assert found[before]["error"]["code"] == "unreadable_input"
    assert texts(found[last]) == [ANSWERS["dog"]]
    assert all(texts(found[row]) == [ANSWERS["one"]] for row in range(before))


def test_a_row_above_the_size_limit_becomes_an_error_record(batch: Batch) -> None:
    long = b'{"prompt": "' + b"x" * 200_000 + b'"}\n'
    found = batch.answers(
        b'"one"\n' + long + b'"dog"\n' + long[:-1], "--max-row-mib", "0.1", *GREEDY, code=1
    )
    assert [found[i]["error"] and found[i]["error"]["code"] for i in range(4)] == [
        None, "row_too_large", None, "row_too_large"
    ]  # fmt: skip
    assert texts(found[2]) == [ANSWERS["dog"]]


@pytest.mark.extra
def test_parquet_and_zstd(batch: Batch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import datetime

    import pyarrow.parquet as parquet

    day = datetime.date(2026, 1, 2)
    table = pyarrow.table(
        {
            "prompt": ["one", "dog", None],
            "id": [1, 2, 3],
            "score": [0.5, float("nan"), None],
            "day": [day] * 3,
            "mixed": pyarrow.array([None, None, None], pyarrow.string()),
        }
    )
    parquet.write_table(table, batch.directory / "in.parquet")
    output = batch.directory / "out.parquet"
    assert batch.run(batch.directory / "in.parquet", *GREEDY, output=output) == 1, batch.stderr
    found = parquet.read_table(output).to_pylist()
    assert [row["id"] for row in found] == [1, 2, 3], "in the order of the input"
    assert [row["text"] for row in found] == [ANSWERS["one"], ANSWERS["dog"], None]
    assert found[2]["error"].startswith("invalid_request in line 3: a prompt dict needs one of")
    assert found[0]["day"] == "2026-01-02"
    assert found[1]["score"] is None
    assert batch.run(batch.directory / "in.parquet", *GREEDY, output=output) == 1
    assert batch.num_resumed == 3
    with pyarrow.output_stream(str(batch.directory / "z.jsonl.zst"), compression="zstd") as file:
        file.write(b'"one"\n"dog"\n')
    assert batch.run(batch.directory / "z.jsonl.zst", "--sort-output", *GREEDY) == 0
    assert [texts(r)[0] for r in batch.records()] == [ANSWERS["one"], ANSWERS["dog"]]


@pytest.mark.extra
def test_the_size_limit_of_rows_applies_to_parquet(batch: Batch) -> None:
    """Regression: their size was not checked. A row of a dictionary-encoded column refers to all of
    its dictionary, which must not count in full."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    texts_ = pyarrow.array(["one", "dog " * 9999, "dog"])
    table = pyarrow.table({"prompt": texts_.dictionary_encode(), "id": [1, 2, 3]})
    parquet.write_table(table, batch.directory / "in.parquet")
    assert batch.run(batch.directory / "in.parquet", "--max-row-mib", "0.03", *GREEDY) == 1
    found = batch.by_row()
    assert found[1]["error"]["code"] == "row_too_large"
    assert [texts(found[row])[0] for row in (0, 2)] == [ANSWERS["one"], ANSWERS["dog"]]


def test_an_error_without_pyarrow_names_the_extra(batch: Batch, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = batch.write(["one"])
    assert batch.run(source, output=batch.directory / "out.parquet") == 2
    assert "pip install 'nanoengine[batch]'" in batch.stderr
    assert batch.run(batch.write(b"", "in.parquet")) == 2
    assert batch.run(source, *GREEDY) == 0


# --- CSV to CSV -----------------------------------------------------------------------------------


def cells(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_a_csv_output_has_the_columns_of_the_input_and_the_answers(batch: Batch) -> None:
    """Regression: it was filled with JSON lines."""
    content = 'question;text\none;"a\nb"\n"dog";é\none;"x";3\n'
    source = batch.write(content.encode("utf-8-sig"), "in.csv")
    output = batch.directory / "out.csv"
    assert batch.run(source, "--prompt-column", "question", *GREEDY, output=output) == 1
    assert output.read_bytes().startswith(
        b"\xef\xbb\xbfquestion;text;output_text;finish_reason;error"
    )
    one, dog, bad = cells(output, ";")
    assert (one["question"], one["text"], one["output_text"]) == ("one", "a\nb", ANSWERS["one"])
    assert (dog["text"], dog["output_text"], dog["finish_reason"]) == ("é", ANSWERS["dog"], "stop")
    assert bad["error"] == "unreadable_row in line 5: the row has 3 cells, but the header has 2"
    assert batch.run(source, "--prompt-column", "question", *GREEDY, output=output) == 1
    assert batch.num_resumed == 3


def test_columns_of_several_answers_are_numbered_and_openai_rows_have_their_id(
    batch: Batch,
) -> None:
    rows = [completion("a", "one", n=2, temperature=1), chat("b", "x", max_tokens=3), chat(5)]
    output = batch.directory / "out.tsv"
    assert batch.run(batch.write(rows), output=output) == 1
    found = cells(output, "\t")
    assert list(found[0]) == [
        "custom_id", "text_1", "finish_reason_1", "text_2", "finish_reason_2", "error"
    ]  # fmt: skip
    assert [row["custom_id"] for row in found] == ["a", "b", "5"]
    assert found[0]["text_2"] and found[1]["finish_reason_1"] and not found[1]["text_2"]


@pytest.mark.extra
def test_parquet_has_the_columns_of_a_csv(batch: Batch) -> None:
    """Regression: it had nested structs."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "one", "n": 2, "temperature": 1.5}, {"prompt": "dog", "top_k": "x"}]
    source = batch.write([*rows, {"prompt": "one", "text": [5], "logprobs": 1}])
    for name in ("out.csv", "out.parquet"):
        assert batch.run(source, output=batch.directory / name) == 1
    table = parquet.read_table(batch.directory / "out.parquet")
    (header, *rows) = csv.reader((batch.directory / "out.csv").open(newline=""))
    assert header == table.column_names == [
        "prompt", "n", "temperature", "top_k", "text", "logprobs", "text_1", "finish_reason_1",
        "logprobs_1", "text_2", "finish_reason_2", "logprobs_2", "error"
    ]  # fmt: skip
    assert table["text"].to_pylist()[2] == [5] and table["n"].to_pylist() == [2, None, None]
    assert [[str(x or "") for x in row.values()] for row in table.to_pylist()] == rows


def test_a_csv_is_the_same_after_a_kill(batch: Batch) -> None:
    source = batch.write([{"prompt": w, "x": [i]} for i, w in enumerate(["one", "dog"] * 10)])
    output = batch.directory / "out.csv"
    log = batch.directory / "out.csv.job.jsonl"
    assert batch.run(source, *GREEDY, output=output) == 0, batch.stderr
    whole, lines = output.read_bytes(), log.read_bytes().splitlines(keepends=True)
    for is_there in (True, False):
        log.write_bytes(b"".join(lines[:7]) + lines[7][:20])
        output.unlink() if not is_there else None
        assert batch.run(source, *GREEDY, output=output) == 0, batch.stderr
        assert batch.num_resumed == 7
        assert output.read_bytes() == whole


def test_the_summary_says_where_the_output_is_and_what_failed(batch: Batch) -> None:
    """Regression: for 300 failed rows it only said "failed 300"."""
    rows = [{"prompt": "one"}, {"prompt": "one", "top_k": -5}, {"prompt": "one", "n": "x"}, "??"]
    source = batch.write([*rows, {"prompt": "one", "max_tokens": 1}, {"prompt_token_ids": [10**6]}])
    summary, output = batch.directory / "s.json", batch.directory / "out.csv"
    args = (source, *GREEDY, "--summary-json", summary)
    assert batch.run(*args, "--max-errors", "0", "--no-reorder", output=output) == 3
    first = f"too many errors: 1 of 6 rows in {output}.job.jsonl"
    assert f"\n{first}\n0 rows answered\n1 row failed with" in batch.stderr
    assert batch.run(*args, output=output) == 1
    facts = json.loads(summary.read_text())
    lines = [
        f"complete: 6 of 6 rows in {output}",
        "earlier runs finished 1 row, 1 failed",
        "3 rows answered",
        "1 answer cut at max_tokens or the end of the context: see --max-tokens and",
        "1 empty answer: the model stopped at once; prompts had no chat template",
        f"1 row failed with invalid_row, the first at {source}:3: n must be ",
        f"1 row failed with invalid_request, the first at {source}:6: ",
        f"{facts['output_tokens']} output tokens, {facts['output_tokens_per_s']:,} per second",
        f"{facts['elapsed_s']:,.1f} s, after {facts['loading_s']:,.1f} s of loading",
    ]
    shown = batch.stderr.splitlines()[-len(lines) :]
    assert all(map(str.startswith, shown, lines)), batch.stderr
    assert (facts["empty_answers"], facts["cut_answers"]) == (1, 1)
    assert (facts["rows"], facts["answered"], facts["failed"]) == (6, 3, 2)
    assert facts["reasons"]["invalid_row"][0] == 1 and facts["failed_before"] == 1
    assert facts["output_tokens"] > 1 and facts["ended"] == "complete"


def test_an_interrupted_run_counts_the_tokens_of_unfinished_rows(
    batch: Batch, monkeypatch: Any
) -> None:
    """Regression: it reported 0 tokens per second."""
    on_step, summary = Progress.on_step, batch.directory / "s.json"

    def stop(progress: Progress, *args: Any) -> None:
        on_step(progress, *args)
        if progress.num_tokens == 3:
            raise Stopped(15)

    monkeypatch.setattr(Progress, "on_step", stop)
    args = batch.write([{"prompt": "one", "ignore_eos": True}]), *GREEDY, "--summary-json", summary
    assert batch.run(*args) == 143, batch.stderr
    facts = json.loads(summary.read_text())
    assert (facts["answered"], facts["output_tokens"]) == (0, 3)
    assert facts["output_tokens_per_s"] > 0 and "\n3 output tokens, " in batch.stderr
    monkeypatch.setattr("nanoengine.llm.LLM.__init__", Mock(side_effect=Stopped(15)))
    assert batch.run(*args) == 143
    assert batch.stderr == "interrupted before any new row ran\n"


def test_a_complete_job_loads_no_model(batch: Batch, monkeypatch: Any) -> None:
    """Regression: it loaded the model, and did not say that it ran nothing."""
    source, output = batch.write(["one", "dog"], "in.txt"), batch.directory / "out.csv"
    assert batch.run(source, *GREEDY, output=output) == 0
    content = output.read_bytes()
    monkeypatch.setattr("nanoengine.llm.LLM.__init__", None)
    output.unlink()
    assert batch.run(source, *GREEDY, output=output) == 0
    assert output.read_bytes() == content
    finished = f"complete: earlier runs finished all 2 rows; see {output}"
    assert batch.stderr.startswith(f"{finished}\nto run all rows again, name another")


@pytest.mark.parametrize(
    ("elapsed_s", "rows", "tokens", "expected"),
    [
        (10, (0, 29, 29), (290, 290), None),  # Nothing has been answered.
        (10, (4, 25, 25), (20 + 250, 250), 10 * 250 / 270),  # Regression: the line said 0:00.
        (10, (100, 20, 920), (10_000 + 1_000, 1_000), 10 * (1_000 + 900 * 100) / 11_000),
        (10, (2, 64, 3), (20 + 15, 15), 10 * 15 / 35),  # A row may have several sequences.
        (10, (2, 0, 3), (20, 0), 10 * 30 / 20),
        (0.1, (99, 1, 1), (990, 2), 1),  # It never rounds to 0:00.
        (10, (99, 1, 1), (990, 0), 1),
        (10, (100, 0, 0), (990, 0), None),
        (10, (5, 5, 5), (0, 0), None),  # Embeddings have no output tokens.
    ],
)
def test_the_time_left_assumes_that_running_rows_have_half_of_their_tokens(
    elapsed_s: float, rows: tuple[int, ...], tokens: tuple[int, int], expected: float | None
) -> None:
    assert time_left_s(elapsed_s, *rows, *tokens) == expected


def test_inputs_without_rows_cause_a_warning(batch: Batch) -> None:
    for content in (b"", b"prompt,x\n"):
        assert batch.run(batch.write(content, "in.csv"), "--restart") == 0
        assert "the inputs have no rows" in batch.stderr


# --- resuming -------------------------------------------------------------------------------------


def test_the_same_command_resumes_after_the_last_complete_record(batch: Batch) -> None:
    source = batch.write([completion(str(i)) for i in range(20)])
    args = (source, "--stop", "x", "--stop", "y", "--logit-bias", "5", "1.5")
    assert batch.run(*args) == 0
    lines = batch.output.read_bytes().splitlines(keepends=True)
    for kept in (0, 1, 7, 19, 20):
        for torn in (b"", lines[-1][: len(lines[-1]) // 2], b"\0" * 50):
            batch.output.write_bytes(b"".join(lines[:kept]) + torn)
            assert batch.run(*args) == 0, batch.stderr
            assert batch.num_resumed == kept
            assert len(batch.by_row()) == 20
            assert sorted(batch.output.read_bytes().splitlines()) == sorted(
                line.rstrip() for line in lines
            )


def test_an_invalid_line_is_dropped_and_its_row_runs_again(batch: Batch) -> None:
    source = batch.write([completion(str(i)) for i in range(5)])
    assert batch.run(source) == 0
    lines = batch.output.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * (len(lines[2]) - 1) + b"\n"
    batch.output.write_bytes(b"".join(lines))
    assert batch.run(source) == 0
    assert "dropped 1 line: not records" in batch.stderr
    assert len(batch.by_row()) == 5


def test_another_job_is_refused_with_the_differences(batch: Batch) -> None:
    source = batch.write([completion("a"), completion("b")])
    assert batch.run(source, "--seed", "3") == 0
    kept = batch.output.read_bytes()
    assert batch.run(source, "--seed", "4", "--top-k", "9") == 2
    assert "engine.seed: it was 3, it is 4" in batch.stderr
    assert "rows.sampling.top_k: it was null, it is 9" in batch.stderr
    other = batch.write([completion("c")], "other.jsonl")
    assert batch.run(other, "--seed", "3") == 2
    assert "inputs[0]: it was" in batch.stderr
    source.write_bytes(source.read_bytes().replace(b'"a"', b'"z"'))
    assert batch.run(source, "--seed", "3") == 2
    assert "in.jsonl: its content has changed" in batch.stderr
    config = batch.directory / "model" / "config.json"
    config.write_text(f"{config.read_text()} ")
    assert batch.run(source, "--seed", "3") == 2
    assert "model.files.config.json: it was" in batch.stderr
    assert batch.output.read_bytes() == kept
    assert batch.run(source, "--seed", "4", "--restart") == 0
    assert (batch.directory / "out.1.jsonl").read_bytes() == kept
    assert (batch.directory / "out.1.jsonl.job.json").exists()
    assert len(batch.by_row()) == 2


def test_rows_appended_to_an_input_are_run(batch: Batch) -> None:
    source = batch.write([completion("a")])
    more = batch.write([completion("c")], "more.jsonl")
    assert batch.run(source) == 0
    with source.open("a") as file:
        file.write(json.dumps(completion("b")) + "\n")
    assert batch.run(source) == 0
    assert batch.run(source, more) == 0
    assert [record["custom_id"] for record in batch.records()] == ["a", "b", "c"]
    with source.open("a") as file:
        file.write(json.dumps(completion("d")) + "\n")
    assert batch.run(source, more) == 2, "rows of the second file would have other numbers"


def test_failed_rows_run_again_with_retry_errors(batch: Batch) -> None:
    rows = [completion("a"), completion("b", temprature=1), completion("c")]
    source = batch.write(rows)
    assert batch.run(source) == 1
    assert batch.run(source) == 1
    assert batch.num_resumed == 3
    assert batch.run(source, "--retry-errors") == 1
    assert batch.num_resumed == 2
    assert len(batch.by_row()) == 3


def test_a_second_process_on_the_same_output_is_refused(batch: Batch) -> None:
    source = batch.write(["one"])
    assert batch.run(source, *GREEDY) == 0
    runs = batch.directory / "out.jsonl.job.runs"
    code = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1] + '.lock');"
        "lock.acquire(); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(batch.output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        runs.write_text(f"run {other.pid} 0\n")
        assert batch.run(source, *GREEDY) == 2
        assert f"is being written by another process, pid {other.pid}" in batch.stderr
        other.communicate()
    assert batch.run(source, *GREEDY) == 0


# --- how a run ends -------------------------------------------------------------------------------


def test_error_records_go_to_their_own_file_and_the_output_is_sorted(batch: Batch) -> None:
    rows = [completion(str(i), **({"x": 1} if i % 3 == 1 else {})) for i in range(30)]
    errors = batch.directory / "errors.jsonl"
    args = (batch.write(rows), "--errors", errors, "--sort-output")
    assert batch.run(*args) == 1
    assert [row_of(record) for record in batch.records()] == [i for i in range(30) if i % 3 != 1]
    assert [row_of(record) for record in batch.records(errors)] == list(range(1, 30, 3))
    assert batch.run(*args) == 1
    assert batch.num_resumed == 30


def test_too_many_errors_stop_the_run(batch: Batch) -> None:
    rows = [completion(str(i), **({"x": 1} if i >= 5 else {})) for i in range(30)]
    source = batch.write(rows)
    assert batch.run(source, "--max-errors", "3", "--no-reorder") == 3
    assert "4 rows failed, more than --max-errors 3;" in batch.stderr
    assert batch.stderr.endswith("\nthe same command resumes the job\n")
    assert sum(record["error"] is not None for record in batch.records()) == 4
    assert batch.run(source, "--max-errors", "0", "--restart") == 3
    assert batch.run(source) == 1
    assert len(batch.by_row()) == 30


def test_a_duplicate_custom_id_causes_a_warning(batch: Batch) -> None:
    rows = [completion(name) for name in ("a", "b", "a", "c")]
    assert batch.run(batch.write(rows)) == 0
    assert "in.jsonl:3: both rows run" in batch.stderr
    assert len(batch.by_row()) == 4


def test_rows_from_stdin_are_answered_to_a_pipe(batch: Batch, monkeypatch: Any) -> None:
    stdin = batch.write(b'"one"\ntorn\n"dog"\n', "stdin").open("rb")
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": stdin}))
    read, write = os.pipe()
    assert batch.run("-", *GREEDY, output=f"/dev/fd/{write}") == 1
    os.close(write)
    with open(read, "rb") as file:
        lines = [json.loads(line) for line in file]
    assert {row_of(line): texts(line) for line in lines} == {
        0: [ANSWERS["one"]], 1: [], 2: [ANSWERS["dog"]]
    }  # fmt: skip
    assert sorted(path.name for path in batch.directory.iterdir()) == ["model", "stdin"]


@pytest.mark.parametrize("options", [(), ("--no-reorder",), ("--input-format", "csv")])
def test_a_row_is_answered_before_the_next_one_is_written(
    batch: Batch, monkeypatch: Any, options: tuple[str, ...]
) -> None:
    """The writer may wait for the answer. Regression: the row waited for 4,096 others."""
    lines = [b"prompt\n", b"one\n", b"dog\n"] if "csv" in options else [b'"one"\n', b'"dog"\n']
    answered: list[int] = []

    class Slow(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            if len(lines) == 1:
                for _ in range(500):
                    if batch.output.read_bytes():
                        break
                    time.sleep(0.01)
                answered.append(len(batch.output.read_bytes().splitlines()))
            return lines.pop(0) if lines else b""

    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": Slow()}))
    assert batch.run("-", *GREEDY, *options) == 0
    assert answered == [1]
    assert [texts(record) for record in batch.records()] == [[ANSWERS["one"]], [ANSWERS["dog"]]]


def test_a_read_error_of_stdin_becomes_an_error_record(batch: Batch, monkeypatch: Any) -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            raise OSError("the disk is gone")

    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": Broken()}))
    assert batch.run("-", *GREEDY) == 1
    (record,) = batch.records()
    assert "can't be read after row 0: the disk is gone" in record["error"]["message"]


def test_the_prefetch_of_stdin_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(prefetch, "MAX_WAITING_BYTES", 100)
    source, read = Input(name="-", form="txt"), []

    def lines() -> Iterator[Line]:
        for row in range(50):
            read.append(row)
            yield Line(row, source, row + 1, bytes(30))

    seen = []
    for line in Prefetcher(lines()):
        if line is not PAUSE:
            time.sleep(0.0005)  # the thread reads ahead up to its limit
            seen.append(line.row)
            assert len(read) - len(seen) <= 5
    assert seen == list(range(50))


def test_a_job_that_read_stdin_is_not_resumed(batch: Batch, monkeypatch: Any) -> None:
    for code in (3, 2):
        stdin = batch.write([{"prompt": 5}], "stdin").open("rb")
        monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": stdin}))
        assert batch.run("-", "--max-errors", "0", *GREEDY) == code
        assert "the same command" not in batch.stderr
    assert "a job of stdin can't be resumed" in batch.stderr


def test_a_row_whose_step_raises_three_times_is_poison(batch: Batch, monkeypatch: Any) -> None:
    """As after a crash of the process: at its third failure the row runs alone and is poison."""
    from tests.support.fake_llm import ScriptedExecutor

    run, bad = ScriptedExecutor._run, [7] * 13

    def failing(self: ScriptedExecutor, plan: Any) -> Any:
        if any(list(new.token_ids) == bad for new in plan.admitted):
            raise ZeroDivisionError("a bug")
        return run(self, plan)

    monkeypatch.setattr(ScriptedExecutor, "_run", failing)
    rows = [completion(str(i), bad if i == 11 else "one") for i in range(50)]
    found = batch.answers(rows, code=1)
    assert [row for row in found if found[row]["error"]] == [11]
    assert found[11]["error"]["code"] == "poison"
    assert "ZeroDivisionError: a bug" in found[11]["error"]["message"]
    assert all(texts(found[row]) == [ANSWERS["one"]] for row in found if row != 11)


# --- unusual inputs -------------------------------------------------------------------------------


def test_another_input_format_is_another_job(batch: Batch) -> None:
    source = batch.write([{"prompt": "one"}] * 3)
    assert batch.run(source) == 0
    assert batch.run(source, "--input-format", "txt") == 2
    assert "read as jsonl, now as txt" in batch.stderr


def test_a_file_name_need_not_be_utf8(batch: Batch) -> None:
    source = batch.directory / os.fsdecode(b"\xff.jsonl")
    source.write_bytes(b'{"prompt": "one"}\nbad\n')
    assert batch.run(source) == 1
    assert batch.by_row()[1]["error"]["file"] == str(source)
    assert batch.run(source) == 1  # the manifest can be compared


def test_the_size_of_a_window_includes_all_columns(batch: Batch, monkeypatch: Any) -> None:
    """Regression: the window was bounded only by prompts: 4,096 rows of 16 MiB are 64 GiB."""
    from nanoengine.jobs import reorder

    monkeypatch.setattr(reorder, "WINDOW_BYTES", 50_000)
    sizes = []
    windows = reorder.windows
    monkeypatch.setattr(
        reorder, "windows", lambda tasks: (sizes.append(len(w[0])) or w for w in windows(tasks))
    )
    assert batch.run(batch.write([{"prompt": "one", "x": "y" * 10_000}] * 20)) == 0
    assert sizes == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([{}, {}], ["{}", "{}"]),
        ([{"a": {}}, None], ['{"a": {}}', None]),
        ([2**60 + 1, 2.5], ["1152921504606846977", "2.5"]),
        ([2**70, 1], [str(2**70), "1"]),
        ([2**64 - 1, -1], [str(2**64 - 1), "-1"]),
        ([{"a": 1}, {"a": "x"}], ['{"a": 1}', '{"a": "x"}']),
        ([[1, "a"], []], ['[1, "a"]', "[]"]),
        ([True, 2], ["true", "2"]),
        (["\ud800", "x"], ['"\\ud800"', '"x"']),
    ],
)
@pytest.mark.extra
def test_a_column_without_a_parquet_type_is_written_as_json(
    batch: Batch, values: list[Any], expected: list[Any]
) -> None:
    """Regression: all rows were answered, and then the table could not be written."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    output = batch.directory / "out.parquet"
    source = batch.write([{"prompt": "one", "x": x, "\ud800": 1} for x in values])
    assert batch.run(source, output=output) == 0, batch.stderr
    table = pyarrow.parquet.read_table(output)
    assert table["x"].to_pylist() == expected
    assert table["\\ud800"].to_pylist() == [1, 1]
    assert table["text"].to_pylist() == [ANSWERS["one"]] * 2


# --- files of a job, and names that refer to other files -----------------------------------------


def test_a_glob_skips_the_files_of_the_job(batch: Batch, monkeypatch: Any) -> None:
    """Regression: the same command was refused, because the glob matched the output."""
    monkeypatch.chdir(batch.directory)
    batch.write(["one", {"no": 1}], "a.jsonl")
    args = ("*.json*", "--errors", "e.jsonl", "--summary-json", "s.json", *GREEDY)
    for options in ((), (), ("--restart",), ()):
        (batch.directory / "out.jsonl.tmp").touch()  # as a killed process leaves it
        assert batch.run(*args, *options, output="out.jsonl") == 1, batch.stderr
        assert [row_of(record) for record in batch.records()] == [0]
        assert ("\nmoved out.jsonl to out.1.jsonl\n" in batch.stderr) == bool(options)
    assert (batch.directory / "out.1.jsonl").exists()
    assert batch.run(*args, "--restart", "--max-model-len", "100000", output="out.jsonl") == 2
    assert not (batch.directory / "out.2.jsonl").exists(), "nothing moves if the command is refused"
    batch.write(["dog"], "out.7.jsonl")  # named like a moved output, but is not one
    assert batch.run(*args, output="out.jsonl") == 1, batch.stderr
    assert len(batch.by_row()) == 2


def test_a_link_stays_a_link(batch: Batch, monkeypatch: Any) -> None:
    """Regression: --sort-output replaced the link by a file; its target kept half of the job."""
    store = batch.directory / "store"
    store.mkdir()
    for name in ("out.jsonl", "e.jsonl"):
        (batch.directory / name).symlink_to(store / name)
    source = batch.write(["one", {"no": 1}, "dog"])
    args = (source, "--sort-output", "--errors", batch.directory / "e.jsonl", *GREEDY)
    for _ in range(2):
        assert batch.run(*args) == 1, batch.stderr
        assert batch.output.is_symlink()
        assert [row_of(record) for record in batch.records(store / "out.jsonl")] == [0, 2]
        assert [row_of(record) for record in batch.records(store / "e.jsonl")] == [1]
    assert batch.num_resumed == 3
    assert batch.run(*args, "--restart") == 1, batch.stderr
    assert batch.output.is_symlink()
    assert [row_of(record) for record in batch.records(store / "out.1.jsonl")] == [0, 2]


def test_two_jobs_cannot_share_an_errors_file(batch: Batch, monkeypatch: Any) -> None:
    """Regression: the second job accepted the empty file, and both used each other's rows."""
    monkeypatch.chdir(batch.directory)
    good, bad = batch.write(["one"], "good.jsonl"), batch.write([{"no": 1}], "bad.jsonl")
    assert batch.run(good, "--errors", "e.jsonl", *GREEDY, output="a.jsonl") == 0
    for output in ("b.jsonl", "/dev/null"):
        assert batch.run(bad, "--errors", "e.jsonl", output=output) == 2
        assert "--errors 'e.jsonl' belongs to the job of e.jsonl.job.json" in batch.stderr
    assert not (batch.directory / "b.jsonl").exists()
    assert batch.run(good, "--errors", "e.jsonl", *GREEDY, output="a.jsonl") == 0


def test_an_errors_file_with_an_output_pipe_and_a_full_device(batch: Batch) -> None:
    source = batch.write([{"no": 1}])
    assert batch.run(source, "--errors", batch.directory / "e.jsonl", output="/dev/null") == 1
    assert len(batch.records(batch.directory / "e.jsonl")) == 1
    assert batch.run(source, output="/dev/full") == 1
    assert "error: No space left on device" in batch.stderr


def test_a_record_waits_until_a_non_blocking_pipe_accepts_it() -> None:
    """Regression: the run ended at the first record for which the pipe was full."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    log, lines = PipeRecordLog(write), [b"%05d" % i + b"x" * 5000 + b"\n" for i in range(60)]
    found: list[bytes] = []
    with open(read, "rb") as file:
        thread = threading.Thread(target=lambda: found.extend(file))
        thread.start()
        try:
            for line in lines:
                log.append(line)
        finally:
            log.close()
            thread.join()
    assert found == lines


# --- inputs that change while a job runs ----------------------------------------------------------


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv"])
def test_lines_appended_while_a_job_runs_are_left_to_the_next_run(
    batch: Batch, monkeypatch: Any, name: str
) -> None:
    """Regression: a row that was read in two halves counted as two invalid rows."""
    row = b"prompt,x\none,1\n" if name.endswith("csv") else b'{"prompt": "one"}\n'
    compress = gzip.compress if name.endswith("gz") else bytes
    source = batch.write(compress(row), name)
    work, late = Job.work, b"dog,2\ntorn" if name.endswith("csv") else b'"dog"\n{"to'

    def later(self: Job, *args: Any) -> Any:
        with source.open("ab") as file:
            file.write(compress(late))
        return work(self, *args)

    monkeypatch.setattr(Job, "work", later)
    assert batch.run(source, *GREEDY) == 0, batch.stderr
    assert len(batch.records()) == 1
    monkeypatch.undo()
    if name.endswith("gz"):
        assert batch.run(source, *GREEDY) == 2
        assert "its content has changed" in batch.stderr


@pytest.mark.extra
def test_parquet_values_without_a_python_type_become_an_error_record(batch: Batch) -> None:
    """Regression: they ended the run, and one of two columns with equal names was dropped."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    texts_, days = pyarrow.array(["one"] * 100), pyarrow.array([0] * 99 + [2**62])
    days = days.view(pyarrow.timestamp("us"))
    table = pyarrow.table({"prompt": texts_, "day": days})
    parquet.write_table(table, batch.directory / "days.parquet")
    twice = pyarrow.Table.from_arrays([texts_, texts_], ["prompt", "prompt"])
    parquet.write_table(twice, batch.directory / "twice.parquet")
    assert batch.run(batch.directory / "*.parquet", *GREEDY) == 1, batch.stderr
    found = batch.by_row()
    *_, days_error, twice_error = (found[row]["error"] for row in sorted(found))
    assert days_error["code"] == twice_error["code"] == "unreadable_input"
    assert "column 'prompt' occurs twice" in twice_error["message"]
    assert len(found) == 64 + 2, "rows of the batches before are answered"


def test_no_record_contains_a_line_separator_of_unicode(batch: Batch) -> None:
    """JSON allows U+2028 in a string, but Python's `splitlines` splits there."""
    ends = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n\0\ufeff"
    source = batch.write([{"prompt": "one", "x": ends, ends: 1}])
    assert batch.run(source, *GREEDY) == 0, batch.stderr
    text = batch.output.read_bytes().decode()
    assert len(text.splitlines()) == 1
    found = batch.by_row()
    assert (found[0]["x"], found[0][ends]) == (ends, 1)
    line = json_line({"x": float("inf"), "y": ends})  # as from a column of a Parquet file
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"x": None, "y": ends}


# --- any bytes ------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    ["custom_id", "body", "url", "method", "prompt", "messages", "turns", "n", "seed", "stop",
     "prompt_token_ids", "temperature", "logit_bias", "tools", "cache_salt", "max_tokens", "role",
     "content", "chat_template", "logprobs", "error", "_row"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["one", "user", "/v1/completions", "/v1/chat/completions", "POST"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
LINES = (
    st.binary(max_size=40)
    | st.builds(lambda value: json.dumps(value).encode(), VALUES)
    | st.builds(lambda body: json.dumps(completion("x", **body)).encode(),
                st.dictionaries(KEYS, VALUES, max_size=3).map(
                    lambda b: {k: v for k, v in b.items() if k not in ("custom_id", "prompt")}))
    | st.sampled_from([b"[" * 5000, b"9" * 5000, b'{"prompt": "one"}', b"\xef\xbb\xbf\"one\""])
)  # fmt: skip


def is_lines(lines: list[bytes]) -> bool:
    """Whether the start of a file shows JSON lines: no array of rows, and no UTF-16."""
    text = b"\n".join(lines).lstrip()
    return text[:2] not in (b"\xff\xfe", b"\xfe\xff") and not re.match(rb'\[\s*[\[{"]', text)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lines=st.lists(LINES.filter(lambda line: b"\n" not in line), max_size=12).filter(is_lines))
@example(lines=[b"[null[]"])
@example(lines=[b"[null, []]"])
@pytest.mark.filterwarnings("ignore")
def test_each_line_of_arbitrary_bytes_gets_one_record(batch: Batch, lines: list[bytes]) -> None:
    source = batch.write(b"\n".join(lines))
    for path in batch.directory.glob("out*"):
        path.unlink()
    code = batch.run(source, "--max-tokens", "4")
    found = batch.by_row()
    rows = [i for i, line in enumerate(source.read_bytes().split(b"\n")) if line.strip()]
    assert sorted(found) == list(range(len(rows)))
    failed = [record for record in found.values() if record["error"] is not None]
    assert code == (1 if failed else 0)
    assert all(record["error"]["line"] == rows[row_of(record)] + 1 for record in failed)


def test_the_summary_suggests_options_if_rows_waited_for_blocks(tmp_path, capsys):
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "One day a dog", "max_tokens": 60}\n' * 4)
    for blocks, waited in ((6, True), (400, False)):
        args = ["batch", "demo", str(rows), "--output", str(tmp_path / f"{blocks}.jsonl")]
        assert cli.main([*args, "--num-kv-blocks", str(blocks), "--max-model-len", "80"]) == 0
        stderr = capsys.readouterr().err
        assert ("rows waited for blocks of the KV cache in " in stderr) == waited, stderr
        assert ("--kv-cache-gib" in stderr) == waited
