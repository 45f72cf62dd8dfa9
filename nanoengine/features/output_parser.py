"""Parses answers into reasoning, text and tool calls.

    <think>The user ...</think>Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>
           reasoning_content   text                  tool_calls

An `OutputParser` describes the format for one request. `LLM.chat` and the rows of `nanoengine
batch` have one if a parser was requested. Text in an unknown format stays text, and `parse_error`
contains the reason. Names are the same as for vLLM's `--reasoning-parser`; the names of
`--tool-call-parser` are in tool_calls.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from nanoengine.errors import RequestError
from nanoengine.features import tool_calls
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.settings.checks import nearest
from nanoengine.settings.params import SamplingParams

AUTO = "auto"
BOUND_TWICE = "tool_choice binds the answer, and a structured output does too: give one of them"
CALL_ID_CHARS = 9
"""Length of a tool call's id, of letters and digits, as Mistral's chat templates require."""

Thought = tuple[str | None, str]
"""The reasoning, or None if there is none, and the rest of the text."""


def think(opened: str, closed: str, prompt: str | None, text: str, ends: str = "") -> Thought:
    """Parses reasoning between tags. The chat template may have written the first tag, or both.

    Args:
        prompt: text of the prompt; None: unknown, then reasoning is assumed to be open, as in vLLM.
        ends: text that ends reasoning without a closing tag.
    """
    written = "" if prompt is None else prompt.rstrip()
    is_open = prompt is None or written.endswith(opened)
    if text.lstrip().startswith(opened):
        text = text.lstrip().removeprefix(opened)
    elif written.endswith(closed) or not (is_open or closed in text):
        return None, text
    reasoning, is_closed, rest = text.partition(closed)
    if ends and ends in reasoning and not is_closed:
        start = reasoning.index(ends)
        reasoning, rest = reasoning[:start], reasoning[start:]
    return reasoning, rest


def qwen3(prompt: str | None, text: str) -> Thought:
    """`<think>`; a tool call also ends it."""
    return think("<think>", "</think>", prompt, text, ends="<tool_call>")


def deepseek_r1(prompt: str | None, text: str) -> Thought:
    """`<think>`, which the chat template writes."""
    return think("<think>", "</think>", prompt, text)


def mistral(prompt: str | None, text: str) -> Thought:
    """`[THINK]`."""
    return think("[THINK]", "[/THINK]", prompt or "", text)


GRANITE = [re.compile(f"(?:Here's|Here is) my {what}:") for what in ("thought process", "response")]


def granite(prompt: str | None, text: str) -> Thought:
    """Sentences instead of tags."""
    thoughts, response = GRANITE
    begin = thoughts.search(text)
    if begin is None:
        return None, text
    end = response.search(text, begin.end())
    if end is None:
        return text[begin.end() :], text[: begin.start()]
    return text[begin.end() : end.start()], text[: begin.start()] + text[end.end() :]


def openai_gptoss(prompt: str | None, text: str) -> Thought:
    """The channel `analysis`; tool calls are left for their own parser."""
    thoughts, rest, end = list[str](), list[str](), 0
    for message in tool_calls.MESSAGE.finditer(text):
        rest.append(text[end : message.start()])
        end = message.end()
        if tool_calls.recipient(message) is not None:
            rest.append(message[0])
        else:
            is_thought = message[2].strip().startswith("analysis")
            (thoughts if is_thought else rest).append(message[3])
    return "\n".join(thoughts) if thoughts else None, "".join([*rest, text[end:]])


REASONING: dict[str, Callable[[str | None, str], Thought]] = {
    one.__name__: one for one in (qwen3, deepseek_r1, mistral, granite, openai_gptoss)
}
MARKED = {"mistral", "openai", "openai_gptoss"}
"""Parsers whose tags are special tokens, which the text contains only on request."""

REASONING_SIGNS = {
    "openai_gptoss": r"<\|channel\|>",
    "granite": "Here is my thought process",
    "mistral": r"\[THINK\]",
    "qwen3": r"(?s)\A(?=.*<think>)(?=.*<tool_call>)",
    "deepseek_r1": "<think>|</think>",
}
CALL_SIGNS = {
    "openai": r"<\|channel\|>",
    "qwen3_coder": "<function=",
    "hermes": r"(?s)\A(?!.*<arg_key>)(?=.*arguments)(?=.*<tool_call>)",
    "mistral": r"\[TOOL_CALLS\]",
    "llama3_json": r'parameters\\?": dictionary',
}
"""Patterns that identify a parser by the model's chat template; the first match is used."""


OPTIONS: dict[str, tuple[Iterable[str], dict[str, str]]] = {
    "reasoning_parser": (REASONING, REASONING_SIGNS),
    "tool_call_parser": (tool_calls.READERS, CALL_SIGNS),
}
"""Per option, the names of its parsers and their patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParser:
    """How the answers to one request are parsed.

    Attributes:
        reasoning, calls: names of parsers; None: not parsed.
        schemas: JSON schemas of the functions that may be called.
        choice, name: the request's tool_choice; unless it is "auto", a grammar restricts answers.
    """

    reasoning: str | None = None
    calls: str | None = None
    schemas: tool_calls.Schemas = field(default_factory=dict)
    choice: tool_calls.Choice | None = None
    name: str | None = None

    @property
    def is_bound(self) -> bool:
        """Whether an answer must consist of tool calls."""
        return self.choice in ("required", "named")

    def needs(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that the answer needs.

        Raises:
            RequestError: tools contradict each other.
        """
        if self.is_bound:
            schema = tool_calls.forced_schema(self.name, self.schemas)
            return {"structured_outputs": {"json": schema}}
        has_marks = not MARKED.isdisjoint((self.reasoning, self.calls))
        return {"skip_special_tokens": False} if has_marks else {}

    def params(self, given: Any) -> Any:
        """Adds the needed fields to the parameters, or to each of a list."""
        if not isinstance(given, SamplingParams):
            return list(map(self.params, given))
        if self.is_bound and given.structured_outputs is not None:
            raise RequestError(BOUND_TWICE)
        return dataclasses.replace(given, **self.needs())

    def taken_apart(self, output: RequestOutput, key: str) -> RequestOutput:
        """Parses the completions of an output.

        `key` determines the tool calls' ids, so that a row gets the same ids each time.
        """
        completions = [
            one if one.error is not None else self._parts(one, output.prompt, f"{key}/{one.index}")
            for one in output.outputs
        ]
        return dataclasses.replace(output, outputs=completions)

    def _parts(self, one: CompletionOutput, prompt: str | None, key: str) -> CompletionOutput:
        reasoning, text, found, problem = None, one.text, [], None
        if self.reasoning is not None and not self.is_bound:
            reasoning, text = REASONING[self.reasoning](prompt, text)
        try:
            if self.is_bound:
                found, text = tool_calls.forced_calls(self.name, text), ""
            elif self.calls is not None:
                found, pieces = tool_calls.READERS[self.calls](text, self.schemas)
                text = tool_calls.rest(pieces) if found else text
        except (ValueError, RecursionError) as error:
            problem = f"a call can't be read, so it stays text: {error}"
        calls = [
            {"id": _call_id(f"{key}/{i}"), "type": "function", "function": call._asdict()}
            for i, call in enumerate(found)
        ]
        parts = {"reasoning_content": reasoning, "tool_calls": calls or None}
        return dataclasses.replace(one, text=text, parse_error=problem, **parts)


def _call_id(key: str) -> str:
    return xxhash.xxh3_64_hexdigest(key.encode(errors="backslashreplace"))[:CALL_ID_CHARS]


def answer_form(
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    tools: Sequence[Any] | None,
    tool_choice: Any,
    chat_template: Callable[[], Any],
) -> OutputParser | None:
    """The requested format; None if nothing is to be parsed.

    Args:
        chat_template: returns the model's chat template, which determines "auto".

    Raises:
        RequestError: an unknown name; no format found for "auto"; a choice without its tool.
    """
    schemas = tool_calls.schemas_of(tools or ())
    choice, name = tool_calls.choice_of(tool_choice, schemas)
    reasoning, calls = reader_of("reasoning_parser", reasoning_parser, chat_template), None
    if choice == AUTO:
        calls = reader_of("tool_call_parser", tool_call_parser, chat_template)
    if calls == "openai" and reasoning is None:
        reasoning = "openai_gptoss"  # Why: its calls use the same channels.
    form = OutputParser(reasoning=reasoning, calls=calls, schemas=schemas, choice=choice, name=name)
    return form if reasoning is not None or calls is not None or form.is_bound else None


def reader_of(option: str, name: str | None, chat_template: Callable[[], Any]) -> str | None:
    """The name of a parser; "auto" selects the one whose pattern the chat template matches.

    Raises:
        RequestError: the name is unknown, or no pattern matches the template.
    """
    names, signs = OPTIONS[option]
    if name is None or name in names:
        return name
    if name != AUTO:
        raise RequestError(f"unknown {option} {name!r}; {nearest(name, [AUTO, *names])}")
    template = str(chat_template())
    for found, sign in signs.items():
        if re.search(sign, template):
            return found
    raise RequestError(
        f"{option}='auto': the model's chat template shows no form that is known; give one of"
        f" {', '.join(names)}"
    )
