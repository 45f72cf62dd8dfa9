"""Rows for embeddings and scores in `nanoengine batch`, mixed with chats, and after a stop."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from nanoengine import LLM, PoolingParams
from nanoengine.cli import main as cli
from nanoengine.errors import RequestError
from nanoengine.jobs.records import Recorder
from nanoengine.jobs.rows import RowOptions, RowReader
from nanoengine.jobs.source import Input, Line
from nanoengine.jobs.work import Work
from nanoengine.outputs import CompletionOutput, RequestOutput
from tests.support.pooled_checkpoints import describe, make_pooled, set_keys
from tests.support.text_fixtures import CHAT_TEMPLATE

TEXTS = ["The little girl", "a dog", "é", "Once upon a time"]
OPTIONS = {"num_kv_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_pooled(directory, "lm")
    set_keys(directory / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    return directory


def row(url, custom_id="a", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


class Run:
    def __init__(self, directory, capsys):
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self._capsys = capsys

    def __call__(self, model, rows, *options):
        self.input.write_text("".join(json.dumps(record) + "\n" for record in rows))
        named = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        paths = [str(model), str(self.input), "--output", str(self.output)]
        code = cli.main(["batch", *paths, *named, *options])
        self.stderr = self._capsys.readouterr().err
        records = [json.loads(line) for line in self.output.read_text().splitlines()]
        return code, {record["custom_id"]: record for record in records}


@pytest.fixture
def run(tmp_path, capsys):
    return Run(tmp_path, capsys)


def body_of(record):
    assert record["error"] is None
    return record["response"]["body"]


def test_embeddings_scores_and_chats_run_in_one_job(run, model):
    with LLM(model, **OPTIONS) as llm:
        ids = llm.tokenizer.encode(TEXTS[1])
        vectors = [item.outputs.embedding for item in llm.embed(TEXTS, use_tqdm=False)]
        cut = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
        scores = [item.outputs.score for item in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        pair = {"answers": ["n", "y"], "template": "{query}: {document}?"}
        (chosen,) = llm.score(TEXTS[0], TEXTS[1], **pair, use_tqdm=False)
    code, found = run(
        model,
        [
            row("/v1/embeddings", "one", input=TEXTS[0], encoding_format="float", user="u"),
            row("/v1/embeddings", "many", input=TEXTS),
            row("/v1/embeddings", "ids", input=ids),
            row("/v1/embeddings", "mixed", input=[ids, ids[:1]], encoding_format="base64"),
            row("/v1/embeddings", "cut", input=TEXTS[0], dimensions=4),
            row("/v1/chat/completions", "chat", max_tokens=3,
                messages=[{"role": "user", "content": "a dog"}]),
            row("/v1/score", "score", text_1=TEXTS[0], text_2=TEXTS[1:]),
            row("/score", "chosen", text_1=TEXTS[0], text_2=TEXTS[1], **pair),
            row("/rerank", "rank", query=TEXTS[0], documents=TEXTS[1:], top_n=2),
            row("/v2/rerank", "all", query=TEXTS[0], documents=[{"text": t} for t in TEXTS[1:]]),
        ],
    )  # fmt: skip
    assert code == 0
    data = body_of(found["many"])["data"]
    assert [item["index"] for item in data] == [0, 1, 2, 3]
    np.testing.assert_allclose([item["embedding"] for item in data], vectors, atol=1e-5)
    assert body_of(found["many"])["object"] == "list"
    usage = body_of(found["ids"])["usage"]
    assert usage == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    np.testing.assert_allclose(body_of(found["one"])["data"][0]["embedding"], vectors[0], atol=1e-5)
    np.testing.assert_allclose(body_of(found["ids"])["data"][0]["embedding"], vectors[1], atol=1e-5)
    raw = base64.b64decode(body_of(found["mixed"])["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), vectors[1], atol=1e-5)
    short = body_of(found["cut"])["data"][0]["embedding"]
    np.testing.assert_allclose(short, cut[0].outputs.embedding, atol=1e-5)
    assert len(body_of(found["chat"])["choices"]) == 1
    found_scores = [item["score"] for item in body_of(found["score"])["data"]]
    np.testing.assert_allclose(found_scores, scores, atol=1e-5)
    assert body_of(found["chosen"])["data"][0]["score"] == pytest.approx(chosen.outputs.score)
    best = sorted(range(3), key=lambda n: -scores[n])
    ranks = body_of(found["rank"])["results"]
    assert [item["index"] for item in ranks] == best[:2]
    assert [item["document"]["text"] for item in ranks] == [TEXTS[1 + n] for n in best[:2]]
    assert [item["index"] for item in body_of(found["all"])["results"]] == best


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("/v1/embeddings"), "the body has no input"),
        (row("/v1/embeddings", input=[]), "the body has no prompt"),
        (row("/v1/embeddings", input={"a": 1}), "input must be a string"),
        (row("/v1/embeddings", input="a", encoding_format="hex"), "float or base64"),
        (row("/v1/embeddings", input="a", dimensions=65), "dimensions must be at most 64"),
        (row("/v1/embeddings", input="a", temperature=1), "unknown field 'temperature'"),
        (row("/v1/embeddings", input=["a", "b " * 600]), "tokens; max_model_len=512"),
        (row("/score", text_1="a"), "the body has no text_2"),
        (row("/rerank", query="a", documents="b"), "documents a list"),
        (row("/rerank", query="a", documents=[{"title": "b"}]), "must be a string"),
        (row("/rerank", query="a", documents=["b"], top_n=-1), "top_n must be"),
        (row("/v1/images", input="a"), "/v1/embeddings, /score"),
    ],
)
def test_an_invalid_pooling_row_fails_and_other_rows_are_answered(run, model, bad, message):
    code, found = run(model, [bad, row("/v1/embeddings", "good", input=TEXTS)])
    assert code == 1 and len(found) == 2
    assert message in found["a"]["error"]["message"]
    assert len(body_of(found["good"])["data"]) == 4


def test_rows_follow_modules_json(run, tmp_path):
    directory = tmp_path / "model"
    make_pooled(directory, "model")
    describe(directory, {"pooling_mode": "mean"})
    set_keys(directory / "sentence_bert_config.json", max_seq_length=4)
    code, found = run(
        directory,
        [
            row("/v1/embeddings", "short", input="a dog"),
            row("/v1/embeddings", "long", input=TEXTS[3] * 3),
            row("/v1/embeddings", "cut", input=TEXTS[3] * 3, truncate_prompt_tokens=-1),
            row("/v1/completions", "text", prompt="a dog"),
        ],
    )
    assert code == 1
    assert abs(np.linalg.norm(body_of(found["short"])["data"][0]["embedding"]) - 1) > 0.01
    assert "at most 4" in found["long"]["error"]["message"]
    assert body_of(found["cut"])["usage"]["prompt_tokens"] == 4
    assert "no LM head" in found["text"]["error"]["message"]


def make_output(index, error=None):
    done = CompletionOutput(
        index=0, text="", token_ids=[], finish_reason="error" if error else "length", error=error
    )
    return RequestOutput(
        request_id=str(index), index=index, prompt=None, prompt_token_ids=[1], outputs=[done],
        finished=True, pooled=np.ones(2, np.float32),
    )  # fmt: skip


def test_parts_that_finish_in_any_order_are_recorded_in_input_order():
    """A failing part also ends its row only once, whatever the other parts return."""
    reader = RowReader(RowOptions())
    source = Input(name="in.jsonl", form="jsonl")
    tasks = [reader.task(Line(n, source, n + 1, {"prompt": "a"})) for n in range(2)]
    for task in tasks:
        task.parts, task.kind, task.custom_id = ["a", "b", "c"], "pooled", "x"
        task.make_body = lambda outputs: {"order": [output.index for output in outputs]}
    results = []
    work = Work(tasks, lambda task, result: results.append((task, result)))

    def stream(rows):
        assert len(list(rows)) == 6
        for index, error in ((2, None), (5, None), (0, None), (4, "bad"), (1, None), (3, "too")):
            yield make_output(index, error)

    work.run(stream)
    (bad, error), (good, last) = results
    assert (bad.row, str(error)) == (1, "bad")
    record = json.loads(Recorder("m").record(good, last))
    assert good.row == 0 and record["response"]["body"]["order"] == [0, 1, 2]
    assert (work.counts.answered, work.counts.failed) == (1, 1)


def test_a_reader_without_a_model_refuses_embeddings():
    reader = RowReader(RowOptions())
    line = Line(0, Input(name="in.jsonl", form="jsonl"), 1, row("/v1/embeddings", input="a"))
    task = reader.task(line, "chat")
    assert isinstance(task.error, RequestError) and "url must be one of" in str(task.error)


def test_embeddings_and_scores_support_verify_and_dry_run(run, model, capsys):
    rows = [
        row("/v1/embeddings", "a", input=TEXTS[:2]),
        row("/v1/score", "b", queries=TEXTS[0], documents=TEXTS[1:]),
        row("/v1/embeddings", "c", input="x" * 5000),
    ]
    assert run(model, rows, "--verify", "9")[0] == 1, "a row has failed"
    assert "2 of 2 answers are identical" in run.stderr
    paths = [str(model), str(run.input), "--output", str(run.output)]
    assert cli.main(["batch", *paths, "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{run.input}:3: invalid_request: ") and shown.out.count("\n") == 1
    assert "3 rows, 1 would fail" in shown.err
