"""Conversations are rendered by the chat templates of many families; no message is dropped."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.assets import demo_model_path
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings.config import EngineConfig
from nanoengine.text.chats import Chats, parse_messages, user_marker
from nanoengine.text.load_tokenizer import find_chat_template
from nanoengine.text.tokenizer import Tokenizer
from tests.support.text_fixtures import byte_level

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[1] / "data" / "chat_templates").glob("*.jinja"))
}
"""Chat templates in the style of model families; none is copied from a model."""
USER = {"role": "user", "content": "How are you?"}
ASSISTANT = {"role": "assistant", "content": "Fine."}
SYSTEM = {"role": "system", "content": "Be brief."}
SECOND_SYSTEM = {"role": "system", "content": "Be polite."}
TOOL = {"role": "tool", "name": "add", "tool_call_id": "abcdefgh1", "content": "The sum is 3."}
MARKERS = {
    "CHATML": "<|im_start|>", "DEEPSEEK": "<|User|>", "GEMMA": "<start_of_turn>",
    "GPT_OSS": "<|message|>", "GRANITE": "<|user|>", "HERMES": "<|im_start|>",
    "LLAMA_3": "<|end_header_id|>", "MISTRAL": "[INST]", "PHI_3": "<|user|>", "ZEPHYR": "<|user|>",
}  # fmt: skip
WITHOUT_SYSTEM = {"GEMMA", "GRANITE"}
WITHOUT_TOOLS = {"CHATML", "GEMMA", "PHI_3", "ZEPHYR", "GRANITE"}


def tool_call(arguments: Any, **changed: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **changed}


def rendered(messages: list[dict[str, Any]], template: str, **options: Any) -> str:
    return Chats(byte_level()).render(
        parse_messages(messages), {"chat_template": TEMPLATES.get(template, template), **options}
    )


VALID = {
    "a user": [USER],
    "several messages": [USER, ASSISTANT, {"role": "user", "content": " And\n now? "}],
    "short texts": [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
    "a blank text": [{"role": "user", "content": " \n"}],
    "no text": [{"role": "user", "content": ""}],
    "an empty answer": [USER, {"role": "assistant", "content": ""}, USER],
    "no answer": [USER, {"role": "assistant", "content": None}, USER],
    "a name": [{**USER, "name": "Bob"}],
    "reasoning in the text": [
        USER,
        {"role": "assistant", "content": "<think>hm</think>Fine."},
        USER,
    ],
    "only reasoning in the text": [
        USER,
        {"role": "assistant", "content": "<think>hm</think>"},
        USER,
    ],
    "reasoning": [USER, {**ASSISTANT, "reasoning_content": "hm"}, USER],
    "only reasoning": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        USER,
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": one} for one in "ab"]}],
    "no parts": [{"role": "user", "content": []}],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_valid_conversations_are_rendered_by_every_template(template: str) -> None:
    for name, talk in VALID.items():
        assert rendered(talk, template), name
        if template not in WITHOUT_SYSTEM:
            assert "Be brief." in rendered([SYSTEM, *talk], template), name


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - WITHOUT_TOOLS))
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_arguments_as_json_are_rendered_like_objects(template: str, content: Any) -> None:
    as_text = [USER, tool_call('{"a":1, "b":"x"}', content=content), TOOL]
    text = rendered(as_text, template)
    as_object = [USER, tool_call({"a": 1, "b": "x"}, content=content), TOOL]
    assert text == rendered(as_object, template)
    assert '\\"a' not in text and "'a'" not in text
    if template == "DEEPSEEK":  # Why: this template needs arguments as strings.
        assert '\n```json\n{"a": 1, "b": "x"}\n```' in text
    assert "The sum is 3." in text
    assert rendered([USER, tool_call("", content=content), TOOL], template) == rendered(
        [USER, tool_call({}, content=content), TOOL], template
    )


def test_arguments_that_are_not_json_raise() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]: the arguments .* got '\{\"a\": '"):
        rendered([USER, tool_call('{"a": '), TOOL], "HERMES")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_developer_message_is_a_system_message_unless_the_template_has_the_role(
    template: str,
) -> None:
    talk = [{**SYSTEM, "role": "developer"}, USER]
    if template in WITHOUT_SYSTEM:
        with pytest.raises(RequestError):
            rendered(talk, template)
    elif template == "GPT_OSS":
        assert "<|start|>developer" in rendered(talk, template)
    else:
        assert rendered(talk, template) == rendered([SYSTEM, USER], template)
    named = "{% for m in messages %}{{ m.role if m.role in ('user', 'developer') }}{% endfor %}"
    named += "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(talk, named).startswith("developeruser")


DROPPED: dict[str, tuple[list[dict[str, Any]], set[str], str]] = {
    "an unknown role": (
        [USER, {"role": "critic", "content": "Bad."}, USER],
        {"PHI_3", "ZEPHYR", "DEEPSEEK", "GPT_OSS", "HERMES", "GRANITE"},
        r"the content of messages\[1\] with role 'critic'",
    ),
    "a later system message": (
        [USER, ASSISTANT, SECOND_SYSTEM, USER],
        {"GPT_OSS", "GRANITE"},
        r"the content of messages\[2\] with role 'system'",
    ),
    "the first of two system messages": (
        [SYSTEM, SECOND_SYSTEM, USER],
        {"DEEPSEEK"},
        r"the content of messages\[0\]",
    ),
    "tool calls": (
        [USER, tool_call({"a": 1}), TOOL],
        {"CHATML", "PHI_3", "ZEPHYR", "GRANITE"},
        r"the tool_calls of messages\[1\]",
    ),
    "a tool result": (
        [USER, ASSISTANT, TOOL],
        {"PHI_3", "ZEPHYR", "GRANITE"},
        r"the content of messages\[2\] with role 'tool'",
    ),
    "a mistyped key": (
        [{"role": "user", "contnet": "How are you?"}],
        set(TEMPLATES),
        r"the contnet of messages\[0\]",
    ),
    "the same text as another message": (
        [{**USER, "role": "critic"}, USER],
        {"PHI_3", "HERMES"},
        r"the content of messages\[0\] with role 'critic'",
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_message_that_the_template_drops_raises(name: str) -> None:
    talk, templates, message = DROPPED[name]
    for template in sorted(templates):
        with pytest.raises(RequestError, match=f"the chat template drops {message}"):
            rendered(talk, template)


def test_a_message_that_changes_the_prompt_is_not_dropped() -> None:
    control = {"role": "control", "content": "thinking"}
    assert "Think first." in rendered([control, USER], "GRANITE")
    with pytest.raises(RequestError, match=r"drops the content of messages\[0\]"):
        rendered([{**control, "content": "humming"}, USER], "GRANITE")


def test_an_error_of_a_template_contains_its_message() -> None:
    with pytest.raises(RequestError, match=r"refused the conversation: .* must alternate"):
        rendered([USER, USER], "GEMMA")


def test_the_content_format_is_detected_once_per_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, calls = byte_level(), []
    render = type(tokenizer).render_chat

    def counted(self: Any, messages: Any, **options: Any) -> str:
        calls.append(messages)
        return render(self, messages, **options)

    monkeypatch.setattr(type(tokenizer), "render_chat", counted)
    chats = Chats(tokenizer)
    for text in "abc":
        talk = parse_messages([SYSTEM, {"role": "user", "content": text}])
        assert text in chats.render(talk, {"chat_template": TEMPLATES["CHATML"]})
    assert len(calls) == 1 + 3
    talk = [SYSTEM, USER, {"role": "assistant", "content": "To be"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = chats.render(parse_messages(talk), {"chat_template": TEMPLATES["CHATML"], **options})
    assert text.endswith("To be")


@pytest.mark.parametrize("name", MARKERS)
def test_the_marker_of_a_users_message_is_the_last_one_before_it(name: str) -> None:
    tokenizer = byte_level()
    render = functools.partial(tokenizer.render_chat, chat_template=TEMPLATES[name])
    assert user_marker(SimpleNamespace(render_chat=render)) == MARKERS[name]  # type: ignore[arg-type]


def test_a_template_in_the_settings_replaces_the_models(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}?!", encoding="utf-8")
    for chat_template in (str(file), "{{ messages[0].content }}?!"):
        config = EngineConfig(model=str(demo_model_path()), chat_template=chat_template)
        assert find_chat_template(config) == "{{ messages[0].content }}?!"
        assert Tokenizer.of(config).render_chat([USER]) == "How are you??!"
    with pytest.raises(ConfigError, match=r"chat_template must be .* got 'missing\.jinja'"):
        EngineConfig(model="m", chat_template="missing.jinja")
