"""`LLM.chat` parses reasoning and tool calls if a parser is given, and otherwise returns text."""

from __future__ import annotations

import pytest

from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_llm import LONG, MakeLLM
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

TOOLS = [{"type": "function", "function": {"name": "look"}}]
OUTPUT = '<think>Hm.</think>Yes.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture
def llm(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_level().backend, "chat_template", CHAT_TEMPLATE)
    script = {"<|user|>one</s><|assistant|>": OUTPUT}
    options = {"tokenizer": byte_level(), "max_model_len": 400, "num_blocks": 256}
    with make_llm(script, **options) as llm:
        yield llm


def test_chat_parses_reasoning_and_tool_calls(llm) -> None:
    options = {"tools": TOOLS, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    for params in (LONG, [SamplingParams(temperature=0, max_tokens=None)]):
        (output,) = llm.chat(MESSAGES, params, False, **options)
        (completion,) = output.outputs
        assert (completion.reasoning_content, completion.text) == ("Hm.", "Yes.")
        assert completion.tool_calls[0]["function"] == {"name": "look", "arguments": "{}"}
    (output,) = llm.chat(MESSAGES, LONG, False, tools=TOOLS)
    (completion,) = output.outputs
    assert completion.text.startswith("<think>")
    assert (completion.reasoning_content, completion.tool_calls) == (None, None)


def test_the_parser_is_selected_by_the_template_of_the_call(llm) -> None:
    template = CHAT_TEMPLATE + "{# <think> #}"
    options = {"chat_template": template, "reasoning_parser": "auto"}
    (output,) = llm.chat(MESSAGES, LONG, False, **options)
    assert output.outputs[0].reasoning_content == "Hm."
    with pytest.raises(RequestError, match="'auto'"):
        llm.chat(MESSAGES, LONG, False, reasoning_parser="auto")


def test_tool_choice_and_structured_outputs_exclude_each_other(llm) -> None:
    params = SamplingParams(structured_outputs={"json_object": True})
    with pytest.raises(RequestError, match="tool_choice and structured_outputs both"):
        llm.chat(MESSAGES, params, False, tools=TOOLS, tool_choice="required")
