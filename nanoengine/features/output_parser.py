"""Parses completions into reasoning, text and tool calls.

    <think>The user ...</think>Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>
           reasoning_content   text                  tool_calls

An `OutputParser` parses the completions of one request. `LLM.chat` and the rows of `nanoengine
batch` have one if a parser was requested. Text in an unknown format stays text, and `parse_error`
contains the reason. The parsers have the names of vLLM's `--reasoning-parser`; tool_calls.py has
the parsers of `--tool-call-parser`.
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
TWO_CONSTRAINTS = "tool_choice and structured_outputs both constrain the output: give one of them"
CALL_ID_CHARS = 9
"""Length of a tool call's id, of letters and digits, as Mistral's chat templates require."""

ReasoningAndRest = tuple[str | None, str]
"""The reasoning, or None if there is none, and the rest of the text."""


def parse_tagged(
    open_tag: str, close_tag: str, prompt: str | None, text: str, end_marker: str = ""
) -> ReasoningAndRest:
    """Parses reasoning between tags. The chat template may have written the first tag, or both.

    Args:
        prompt: text of the prompt; None: unknown, then reasoning is assumed to be open, as in vLLM.
        end_marker: text that ends reasoning without a closing tag.
    """
    prompt_end = "" if prompt is None else prompt.rstrip()
    is_open = prompt is None or prompt_end.endswith(open_tag)
    if text.lstrip().startswith(open_tag):
        text = text.lstrip().removeprefix(open_tag)
    elif prompt_end.endswith(close_tag) or not (is_open or close_tag in text):
        return None, text
    reasoning, is_closed, rest = text.partition(close_tag)
    if end_marker and end_marker in reasoning and not is_closed:
        start = reasoning.index(end_marker)
        reasoning, rest = reasoning[:start], reasoning[start:]
    return reasoning, rest


def qwen3(prompt: str | None, text: str) -> ReasoningAndRest:
    """`<think>`; a tool call also ends it."""
    return parse_tagged("<think>", "</think>", prompt, text, end_marker="<tool_call>")


def deepseek_r1(prompt: str | None, text: str) -> ReasoningAndRest:
    """`<think>`, which the chat template writes."""
    return parse_tagged("<think>", "</think>", prompt, text)


def mistral(prompt: str | None, text: str) -> ReasoningAndRest:
    """`[THINK]`."""
    return parse_tagged("[THINK]", "[/THINK]", prompt or "", text)


GRANITE = [re.compile(f"(?:Here's|Here is) my {what}:") for what in ("thought process", "response")]


def granite(prompt: str | None, text: str) -> ReasoningAndRest:
    """Sentences instead of tags."""
    thoughts, response = GRANITE
    begin = thoughts.search(text)
    if begin is None:
        return None, text
    end = response.search(text, begin.end())
    if end is None:
        return text[begin.end() :], text[: begin.start()]
    return text[begin.end() : end.start()], text[: begin.start()] + text[end.end() :]


def openai_gptoss(prompt: str | None, text: str) -> ReasoningAndRest:
    """The channel `analysis`; tool calls are left for their own parser."""
    analysis, rest, end = list[str](), list[str](), 0
    for message in tool_calls.MESSAGE.finditer(text):
        rest.append(text[end : message.start()])
        end = message.end()
        if tool_calls.recipient(message) is not None:
            rest.append(message[0])
        else:
            is_analysis = message[2].strip().startswith("analysis")
            (analysis if is_analysis else rest).append(message[3])
    return "\n".join(analysis) if analysis else None, "".join([*rest, text[end:]])


REASONING: dict[str, Callable[[str | None, str], ReasoningAndRest]] = {
    parser.__name__: parser for parser in (qwen3, deepseek_r1, mistral, granite, openai_gptoss)
}
SPECIAL_TOKEN_PARSERS = {"mistral", "openai", "openai_gptoss"}
"""Parsers whose tags are special tokens, which the text contains only on request."""

REASONING_PATTERNS = {
    "openai_gptoss": r"<\|channel\|>",
    "granite": "Here is my thought process",
    "mistral": r"\[THINK\]",
    "qwen3": r"(?s)\A(?=.*<think>)(?=.*<tool_call>)",
    "deepseek_r1": "<think>|</think>",
}
CALL_PATTERNS = {
    "openai": r"<\|channel\|>",
    "qwen3_coder": "<function=",
    "hermes": r"(?s)\A(?!.*<arg_key>)(?=.*arguments)(?=.*<tool_call>)",
    "mistral": r"\[TOOL_CALLS\]",
    "llama3_json": r'parameters\\?": dictionary',
}
"""Patterns that identify a parser by the model's chat template; the first match is used."""


OPTIONS: dict[str, tuple[Iterable[str], dict[str, str]]] = {
    "reasoning_parser": (REASONING, REASONING_PATTERNS),
    "tool_call_parser": (tool_calls.PARSERS, CALL_PATTERNS),
}
"""Per option, the names of its parsers and their patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParser:
    """Parses the completions of one request.

    Attributes:
        reasoning, calls: names of parsers; None: not parsed.
        schemas: JSON schemas of the functions that may be called.
        choice, name: the request's tool_choice; unless it is "auto", a grammar constrains the
            completions.
    """

    reasoning: str | None = None
    calls: str | None = None
    schemas: tool_calls.Schemas = field(default_factory=dict)
    choice: tool_calls.Choice | None = None
    name: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether a completion must consist of tool calls."""
        return self.choice in ("required", "named")

    def required_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that the parser needs.

        Raises:
            RequestError: tools contradict each other.
        """
        if self.is_constrained:
            schema = tool_calls.constrained_schema(self.name, self.schemas)
            return {"structured_outputs": {"json": schema}}
        has_special_tags = not SPECIAL_TOKEN_PARSERS.isdisjoint((self.reasoning, self.calls))
        return {"skip_special_tokens": False} if has_special_tags else {}

    def params(self, given: Any) -> Any:
        """Adds the needed fields to the parameters, or to each of a list."""
        if not isinstance(given, SamplingParams):
            return list(map(self.params, given))
        if self.is_constrained and given.structured_outputs is not None:
            raise RequestError(TWO_CONSTRAINTS)
        return dataclasses.replace(given, **self.required_fields())

    def parse(self, output: RequestOutput, key: str) -> RequestOutput:
        """Parses the completions of an output.

        `key` determines the tool calls' ids, so that a row gets the same ids each time.
        """
        completions = [
            c if c.error is not None else self._parse(c, output.prompt, f"{key}/{c.index}")
            for c in output.outputs
        ]
        return dataclasses.replace(output, outputs=completions)

    def _parse(self, completion: CompletionOutput, prompt: str | None, key: str) -> Any:
        reasoning, text, found, problem = None, completion.text, [], None
        if self.reasoning is not None and not self.is_constrained:
            reasoning, text = REASONING[self.reasoning](prompt, text)
        try:
            if self.is_constrained:
                found, text = tool_calls.constrained_calls(self.name, text), ""
            elif self.calls is not None:
                found, pieces = tool_calls.PARSERS[self.calls](text, self.schemas)
                text = tool_calls.join_text(pieces) if found else text
        except (ValueError, RecursionError) as error:
            problem = f"a tool call can't be parsed, so it stays text: {error}"
        calls = [
            {"id": _call_id(f"{key}/{i}"), "type": "function", "function": call._asdict()}
            for i, call in enumerate(found)
        ]
        parts = {"reasoning_content": reasoning, "tool_calls": calls or None}
        return dataclasses.replace(completion, text=text, parse_error=problem, **parts)


def _call_id(key: str) -> str:
    return xxhash.xxh3_64_hexdigest(key.encode(errors="backslashreplace"))[:CALL_ID_CHARS]


def make_parser(
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    tools: Sequence[Any] | None,
    tool_choice: Any,
    chat_template: Callable[[], Any],
) -> OutputParser | None:
    """The requested parser; None if nothing is to be parsed.

    Args:
        chat_template: returns the model's chat template, which determines "auto".

    Raises:
        RequestError: a name is unknown; "auto" finds no format; the chosen tool is missing.
    """
    schemas = tool_calls.schemas_of(tools or ())
    choice, name = tool_calls.choice_of(tool_choice, schemas)
    reasoning, calls = parser_name("reasoning_parser", reasoning_parser, chat_template), None
    if choice == AUTO:
        calls = parser_name("tool_call_parser", tool_call_parser, chat_template)
    if calls == "openai" and reasoning is None:
        reasoning = "openai_gptoss"  # Why: its calls use the same channels.
    formats = {"reasoning": reasoning, "calls": calls}
    parser = OutputParser(**formats, schemas=schemas, choice=choice, name=name)
    return parser if reasoning is not None or calls is not None or parser.is_constrained else None


def parser_name(option: str, name: str | None, chat_template: Callable[[], Any]) -> str | None:
    """The name of a parser; "auto" selects the one whose pattern the chat template matches.

    Raises:
        RequestError: the name is unknown, or no pattern matches the template.
    """
    names, patterns = OPTIONS[option]
    if name is None or name in names:
        return name
    if name != AUTO:
        raise RequestError(f"unknown {option} {name!r}; {nearest(name, [AUTO, *names])}")
    template = str(chat_template())
    for found, pattern in patterns.items():
        if re.search(pattern, template):
            return found
    raise RequestError(
        f"{option}='auto': the model's chat template matches no known format; give one of"
        f" {', '.join(names)}"
    )
