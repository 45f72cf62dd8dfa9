"""`LLM.chat` parses reasoning and tool calls on request, and returns plain text otherwise."""

from __future__ import annotations

import pytest

from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_llm import LONG, MakeLLM
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

TOOLS = [{"type": "function", "function": {"name": "look"}}]
SAID = '<think>Hm.</think>Yes.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
ASKED = [{"role": "user", "content": "one"}]


@pytest.fixture
def llm(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_level().backend, "chat_template", CHAT_TEMPLATE)
    script = {"<|user|>one</s><|assistant|>": SAID}
    options = {"tokenizer": byte_level(), "max_model_len": 400, "num_blocks": 256}
    with make_llm(script, **options) as llm:
        yield llm


def test_parts(llm) -> None:
    asked = {"tools": TOOLS, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    for params in (LONG, [SamplingParams(temperature=0, max_tokens=None)]):
        (output,) = llm.chat(ASKED, params, False, **asked)
        (one,) = output.outputs
        assert (one.reasoning_content, one.text) == ("Hm.", "Yes.")
        assert one.tool_calls[0]["function"] == {"name": "look", "arguments": "{}"}
    (output,) = llm.chat(ASKED, LONG, False, tools=TOOLS)
    (one,) = output.outputs
    assert one.text.startswith("<think>")
    assert (one.reasoning_content, one.tool_calls) == (None, None)


def test_a_template_given_for_the_call_shows_the_form(llm) -> None:
    template = CHAT_TEMPLATE + "{# <think> #}"
    asked = {"chat_template": template, "reasoning_parser": "auto"}
    (output,) = llm.chat(ASKED, LONG, False, **asked)
    assert output.outputs[0].reasoning_content == "Hm."
    with pytest.raises(RequestError, match="'auto'"):
        llm.chat(ASKED, LONG, False, reasoning_parser="auto")


def test_two_things_can_not_bind_an_answer(llm) -> None:
    params = SamplingParams(structured_outputs={"json_object": True})
    with pytest.raises(RequestError, match="tool_choice binds"):
        llm.chat(ASKED, params, False, tools=TOOLS, tool_choice="required")
