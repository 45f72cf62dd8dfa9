"""Parsing outputs into reasoning, tool calls and the rest, by the format of a chat template.

The formats are the same as in vLLM's parser tests; the texts are our own.
"""

from __future__ import annotations

import json

import pytest

from nanoengine.errors import RequestError
from nanoengine.features.output_parser import REASONING, OutputParser, make_parser
from nanoengine.outputs import CompletionOutput, RequestOutput

OPEN, SHUT, BARE = "<user>Hi<model><think>\n", "<user>Hi<model><think>\n\n</think>\n\n", "<model>"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four."

TAGS = [
    # prompt, text, reasoning, rest
    (None, "I add them.</think>Four.", "I add them.", "Four."),
    (None, "I add\nthem.</think>\n\nFour.\nYes.", "I add\nthem.", "\n\nFour.\nYes."),
    (None, "I add them.</think>", "I add them.", ""),
    (None, "</think>Four.", "", "Four."),
    (None, "<think>I add them.</think>Four.", "I add them.", "Four."),
    (None, "\n<think>I add them.</think>\nFour.", "I add them.", "\nFour."),
    (None, "<think>I add", "I add", ""),
    (None, "I add", "I add", ""),
    (None, "", "", ""),
    (OPEN, "I add them.</think>Four.", "I add them.", "Four."),
    (OPEN, "I add", "I add", ""),
    (SHUT, "Four.", None, "Four."),
    (SHUT, "The tag </think> ends it.", None, "The tag </think> ends it."),
    (BARE, "<think>I add them.</think>Four.", "I add them.", "Four."),
    (BARE, "Four.", None, "Four."),
    (BARE, "The tag <think> begins it.", None, "The tag <think> begins it."),
]
CASES = [
    *((name, *case) for name in ("qwen3", "deepseek_r1") for case in TAGS),
    ("qwen3", OPEN, "I look.\n" + CALL, "I look.\n", CALL),
    ("qwen3", BARE, "<think>I look." + CALL, "I look.", CALL),
    ("qwen3", SHUT, "I look." + CALL, None, "I look." + CALL),
    ("deepseek_r1", OPEN, "I look." + CALL, "I look." + CALL, ""),
    ("mistral", None, "[THINK]I add.[/THINK]Four.", "I add.", "Four."),
    ("mistral", None, "Four.", None, "Four."),
    ("granite", None, "Here is my thought process: I add. Here is my response: Four.",
     " I add. ", " Four."),
    ("granite", None, "Here's my thought process:I\nadd.Here's my response:", "I\nadd.", ""),
    ("granite", None, "Here is my thought process:I add", "I add", ""),
    ("granite", None, "Four.", None, "Four."),
    ("openai_gptoss", None, ANALYSIS + FINAL, "Two and two.", "Four."),
    ("openai_gptoss", None, ANALYSIS, "Two and two.", ""),
    ("openai_gptoss", None, ANALYSIS + ANALYSIS + FINAL, "Two and two.\nTwo and two.", "Four."),
    ("openai_gptoss", None, ANALYSIS + FINAL.replace("final", "final <|constrain|>JSON"),
     "Two and two.", "Four."),
    ("openai_gptoss", None, "<|channel|>analysis<|message|>Two", "Two", ""),
    ("openai_gptoss", None, "Four.", None, "Four."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "rest"), CASES)
def test_reasoning_and_the_rest(name, prompt, text, reasoning, rest):
    assert REASONING[name](prompt, text) == (reasoning, rest)


def output(*texts: str, prompt: str | None = None, error: str | None = None) -> RequestOutput:
    completions = [
        CompletionOutput(index=i, text=text, token_ids=[1], finish_reason="stop", error=error)
        for i, text in enumerate(texts)
    ]
    return RequestOutput(
        request_id="r", index=0, prompt=prompt, prompt_token_ids=[1], outputs=completions,
        finished=True,
    )  # fmt: skip


def make_test_parser(
    reasoning=None, calls=None, tools=TOOLS, choice=None, template=""
) -> OutputParser:
    found = make_parser(reasoning, calls, tools, choice, lambda: template)
    assert found is not None
    return found


def test_a_completion_has_three_parts():
    parser = make_test_parser("qwen3", "hermes")
    (one,) = parser.parse(output(f"<think>Hm.</think>Look.{CALL}"), "a").outputs
    assert (one.reasoning_content, one.text, one.parse_error) == ("Hm.", "Look.", None)
    (call,) = one.tool_calls
    assert call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert one.token_ids == [1]


def test_gptoss_completions_have_their_parts_in_channels():
    to = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    parser = make_test_parser(calls="openai")
    assert parser.required_fields() == {"skip_special_tokens": False}
    (one,) = parser.parse(output(ANALYSIS + to), "a").outputs
    assert (one.reasoning_content, one.text) == ("Two and two.", "")
    assert one.tool_calls[0]["function"]["name"] == "f"


def test_ids_of_tool_calls_are_alphanumeric_and_reproducible():
    parser = make_test_parser(calls="hermes")
    both = parser.parse(output(CALL + CALL, CALL), "a").outputs
    ids = [call["id"] for one in both for call in one.tool_calls]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    again = parser.parse(output(CALL + CALL, CALL), "a").outputs
    assert [call["id"] for one in again for call in one.tool_calls] == ids
    other = parser.parse(output(CALL), "b").outputs[0].tool_calls[0]["id"]
    assert other not in ids


def test_a_call_that_can_not_be_parsed_stays_text_with_an_error():
    text = f'Look.{CALL}<tool_call>{{"name": "f"'
    (one,) = make_test_parser("qwen3", "hermes").parse(output(text, prompt=SHUT), "a").outputs
    assert (one.text, one.tool_calls, one.reasoning_content) == (text, None, None)
    assert one.parse_error is not None
    (plain,) = make_test_parser(calls="hermes").parse(output("Just text."), "a").outputs
    assert (plain.text, plain.tool_calls, plain.parse_error) == ("Just text.", None, None)


def test_a_completion_with_an_error_is_not_parsed():
    failed = output("", error="no")
    assert make_test_parser("deepseek_r1").parse(failed, "a") == failed


def test_constrained_completions_are_tool_calls_only():
    parser = make_test_parser("qwen3", choice="required")
    assert parser.is_constrained
    assert parser.required_fields().keys() == {"structured_outputs"}
    text = json.dumps([{"name": "f", "parameters": {"a": 1}}] * 2)
    (one,) = parser.parse(output(text, prompt=OPEN), "a").outputs
    assert (one.text, one.reasoning_content, len(one.tool_calls)) == ("", None, 2)
    named = make_test_parser(choice={"type": "function", "function": {"name": "f"}})
    (one,) = named.parse(output('{"a": 1}'), "a").outputs
    assert one.tool_calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    (cut,) = named.parse(output('{"a": '), "a").outputs
    assert (cut.text, cut.tool_calls) == ('{"a": ', None)
    assert cut.parse_error is not None


QWEN3 = r'{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": ...}" }}<think>\n\n</think>'
TEMPLATES = {
    # chat template: reasoning format, tool call format
    QWEN3: ("qwen3", "hermes"),
    "<tool_call>\n<function=example>\n<parameter=a>": (None, "qwen3_coder"),
    "{{ x }}<|Assistant|><think>\\n": ("deepseek_r1", None),
    "<|channel|>analysis<|message|>": ("openai_gptoss", "openai"),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "Write it after 'Here is my thought process:'": ("granite", None),
    '{"name": function name, "parameters": dictionary of names': (None, "llama3_json"),
    "<tool_call>{name}<arg_key>arguments": (None, None),
    "{{ messages }}": (None, None),
    "": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_auto_selects_the_parser_by_the_chat_template(template):
    reasoning, calls = TEMPLATES[template]
    for option, name in (("reasoning", reasoning), ("calls", calls)):
        if name is None:
            with pytest.raises(RequestError, match="'auto'"):
                make_test_parser(**{option: "auto"}, template=template)
        else:
            assert getattr(make_test_parser(**{option: "auto"}, template=template), option) == name


def test_without_a_requested_parser_completions_are_not_parsed():
    assert make_parser(None, None, None, None, lambda: QWEN3) is None
    assert make_parser(None, "hermes", None, None, lambda: QWEN3) is None
    assert make_parser(None, "hermes", TOOLS, "none", lambda: QWEN3) is None
    assert make_parser(None, None, TOOLS, "auto", lambda: QWEN3) is None


@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_an_unknown_parser_name_raises(option):
    names = {"reasoning_parser": None, "tool_call_parser": None} | {option: "qwen"}
    with pytest.raises(RequestError, match=f"unknown {option} 'qwen'"):
        make_parser(**names, tools=TOOLS, tool_choice=None, chat_template=str)
