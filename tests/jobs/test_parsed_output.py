"""Rows whose outputs are parsed: reasoning and tool calls in their records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine.cli.main import main
from tests.support.batch_jobs import Batch, chat, completion
from tests.support.fake_llm import MakeLLM
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
ANSWERS = {
    "think": "<think>Hm.</think>Yes.",
    "call": f"Let me look.{CALL}",
    "both": f"<think>Hm.</think>{CALL}{CALL}",
    "bad": '<tool_call>\n{"name": "look"',
    "plain": "Yes.",
    "array": '[{"name":"look","parameters":{"at":"sky"}}]',
    "object": '{"at":"sky"}',
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
HERMES = CHAT_TEMPLATE + "{# <tool_call> arguments <think> #}"


def rendered(text: str) -> str:
    return f"<|user|>{text}</s><|assistant|>"


@pytest.fixture
def jobs(batch: Batch, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Runs jobs on a scripted LLM that answers SAID; its chat template has Hermes' format."""
    script = {rendered(text): answer for text, answer in ANSWERS.items()}
    script |= {rendered("think") + "Yes.</s>" + rendered("plain"): "Second."}
    options = {"tokenizer": byte_level(), "max_model_len": 400, "num_blocks": 256}
    make_llm(script, **options).close()
    monkeypatch.setattr(byte_level().backend, "chat_template", HERMES)
    return batch


def choice(record: dict[str, Any]) -> dict[str, Any]:
    return record["response"]["body"]["choices"][0]


def test_rows_with_tools_have_tool_calls_in_their_messages(jobs: Batch) -> None:
    rows = [chat(name, name, tools=TOOLS) for name in ("call", "both", "bad", "plain")]
    rows += [chat("none", "call", tools=TOOLS, tool_choice="none"), chat("without", "call")]
    assert jobs.run(jobs.write(rows)) == 0, jobs.stderr
    found = {record["custom_id"]: choice(record) for record in jobs.records()}
    with_call = found["call"]
    assert (with_call["message"]["content"], with_call["finish_reason"]) == (
        "Let me look.",
        "tool_calls",
    )
    (call,) = with_call["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
    assert len(found["both"]["message"]["tool_calls"]) == 2
    assert found["both"]["message"]["content"] == "<think>Hm.</think>", (
        "without --reasoning-parser it stays text"
    )
    assert found["bad"]["message"]["content"] == ANSWERS["bad"]
    assert "stays text" in found["bad"]["message"]["parse_error"]
    for name in ("plain", "none", "without"):
        assert found[name]["finish_reason"] == "stop"
        assert found[name]["message"].keys() == {"role", "content", "refusal"}
    assert found["without"]["message"]["content"] == ANSWERS["call"]


def test_reasoning_is_parsed_with_a_reasoning_parser(jobs: Batch) -> None:
    rows = [chat("think", "think"), chat("both", "both", tools=TOOLS), completion("c", "one")]
    assert jobs.run(jobs.write(rows), "--reasoning-parser", "auto") == 0, jobs.stderr
    think, both = (choice(record)["message"] for record in jobs.records()[1:])
    assert (think["reasoning_content"], think["content"]) == ("Hm.", "Yes.")
    assert (both["reasoning_content"], both["content"]) == ("Hm.", None)
    assert len(both["tool_calls"]) == 2


def test_outputs_of_simple_rows_have_reasoning_and_tool_calls(jobs: Batch) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "both"}], "tools": TOOLS},
        {"turns": ["think", "plain"]},
    ]
    options = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--temperature", 0)
    assert jobs.run(jobs.write(rows), "--sort-output", *options) == 0, jobs.stderr
    both, turns = (record["outputs"] for record in jobs.records())
    assert both[0]["text"] == ""
    assert (both[0]["reasoning_content"], len(both[0]["tool_calls"])) == ("Hm.", 2)
    assert [turn.get("reasoning_content") for turn in turns] == ["Hm.", None]
    assert [turn["text"] for turn in turns] == ["Yes.", "Second."], (
        "the reasoning is not part of the next prompt"
    )


def test_a_restarted_job_has_the_same_tool_call_ids(jobs: Batch) -> None:
    rows = jobs.write([chat(name, name, tools=TOOLS) for name in ("call", "both")])
    assert jobs.run(rows) == 0
    before = jobs.records()
    assert jobs.run(rows, "--restart") == 0
    ids = [
        [call["id"] for record in records for call in choice(record)["message"]["tool_calls"]]
        for records in (before, jobs.records())
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


def test_without_a_known_parser_a_warning_says_that_tool_calls_stay_text(
    jobs: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level().backend, "chat_template", CHAT_TEMPLATE)
    rows = jobs.write([chat(str(i), "call", tools=TOOLS) for i in range(3)])
    assert jobs.run(rows) == 0
    assert jobs.stderr.count("--tool-call-parser") == 1
    assert {choice(record)["message"]["content"] for record in jobs.records()} == {ANSWERS["call"]}
    assert jobs.run(rows, "--restart", "--tool-call-parser", "hermes") == 0
    assert all(choice(record)["message"]["tool_calls"] for record in jobs.records())


NAMED = {"type": "function", "function": {"name": "look"}}
REFUSED = [
    chat("x", tools=TOOLS, tool_choice="any"),
    chat("x", tool_choice="required"),
    chat("x", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}),
    chat("x", tools=TOOLS, tool_choice=NAMED, response_format={"type": "json_object"}),
    chat("x", tools=[{"name": "f"}]),
    chat("x", tools=TOOLS, parallel_tool_calls=False),
]


def test_unsupported_tool_options_are_refused(jobs: Batch) -> None:
    assert jobs.run(jobs.write(REFUSED)) == 1
    errors = [record["error"] for record in jobs.records()]
    assert [error["code"] for error in errors] == ["invalid_row"] * len(REFUSED)


def test_forced_tool_calls_match_their_schemas(tmp_path, capsys) -> None:
    """A model with random weights writes tool calls, because the grammar allows nothing else."""
    import jsonschema

    from nanoengine import LLM, SamplingParams
    from tests.support.grammars import text_checkpoint, text_tokenizer

    schemas = {
        "look": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}},
                 "required": ["at"], "additionalProperties": False},
        "wait": {"type": "object", "properties": {"for": {"$ref": "#/$defs/T"}},
                 "required": ["for"], "additionalProperties": False,
                 "$defs": {"T": {"type": "integer", "minimum": 1, "maximum": 9}}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in
             schemas.items()]  # fmt: skip
    named = {"type": "function", "function": {"name": "wait"}}
    template, model = CHAT_TEMPLATE, text_checkpoint()
    rows = [
        chat(f"{i}-{which}", "hi", tools=tools, tool_choice=choice, temperature=1.0, max_tokens=200)
        for i in range(3)
        for which, choice in (("required", "required"), ("named", named))
    ]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tmp_path / "tokenizer"
    backend = text_tokenizer()
    backend.save_pretrained(tokenizer)
    (tokenizer / "chat_template.jinja").write_text(template)
    command = ["batch", model, str(path), "--output", str(output), "--tokenizer", str(tokenizer)]
    assert main(command) == 0, capsys.readouterr().err
    finished = 0
    for record in map(json.loads, output.read_text().splitlines()):
        found, which = choice(record), record["custom_id"].split("-")[1]
        if found["finish_reason"] == "length":
            assert found["message"]["parse_error"]
            continue
        finished += 1
        assert found["finish_reason"] == ("tool_calls" if which == "required" else "stop")
        assert found["message"]["content"] is None
        for call in found["message"]["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[name])
    assert finished >= 2
    with LLM(model, tokenizer=str(tokenizer)) as llm:
        params = SamplingParams(max_tokens=200, seed=1)
        message = [{"role": "user", "content": "hi"}]
        (output_,) = llm.chat(message, params, False, tools=tools, tool_choice=named)
        (call,) = output_.outputs[0].tool_calls
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas["wait"])


def test_prompts_of_the_command_line_are_parsed_too(jobs: Batch, capsys: Any) -> None:
    command = ["generate", str(jobs.directory / "model"), "--prompt", "both"]
    command += ["--chat-template", CHAT_TEMPLATE]
    assert main([*command, "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["reasoning_content"] == "Hm."
    assert output["text"] == CALL + CALL, "tool calls need tools"
