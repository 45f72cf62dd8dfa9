"""The forms of prompts, parameters and conversations that callers may pass.

`llm.py` calls it. It only parses arguments and rejects invalid ones; it uses neither the tokenizer
nor the engine.

    "text"                                     one prompt, not a list of characters
    [1, 2, 3]                                  one prompt of token ids
    {"prompt": "text"}                         a text with options: "cache_salt"
    {"prompt_token_ids": [1, 2, 3]}            a "prompt" is also allowed, for the output only
    {"messages": [{"role": ..., ...}, ...]}    a conversation, and any of TEMPLATE_KEYS
    RequestError("...")                        a row that could not be read: the error of its output
    PAUSE                                      from an iterator: there is no prompt yet
    Row(any of these, key=..., ...)            a prompt with its own parameters, priority and key
    [any of these, mixed]                      several prompts; also an array of strings or objects,
                                               or a column of a data frame
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NotRequired, TypedDict

from nanoengine.core.requests import check_text, is_int
from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, nearest, quoted
from nanoengine.settings.params import SamplingParams

CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
TEMPLATE_KEYS = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
)
"""Options of `Tokenizer.render_chat`. chat_template_kwargs has variables of the template."""

RESERVED_VARIABLES = ("messages", "conversation", "tokenize", *TEMPLATE_KEYS)
"""Names that are not allowed as template variables, because they are arguments of the renderer."""

NO_MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of vLLM's prompts that are allowed if their values are empty."""


class TextPrompt(TypedDict):
    """A text prompt, under vLLM's name: a plain dict."""

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[None]


class TokensPrompt(TypedDict):
    """A prompt of token ids, under vLLM's name: a plain dict."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[None]


@checked(RequestError)
@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with its own parameters, priority and key; None uses the values of the call.

    Attributes:
        prompt: any form of a prompt, or a RequestError that explains why it could not be read.
        sampling_params: sampling parameters of this row.
        priority: lower runs first.
        key: identifies the row. Without a seed, the random numbers of a row depend on the engine's
            seed and this key, and not on the order of arrival. So its tokens are the same in any
            batch, in any order, and after a resume. Rows with equal keys have equal random numbers.
            It is also `RequestOutput.key`.

    Raises:
        RequestError: an option is unknown or has a wrong type. The prompt is checked later.
    """

    prompt: Any
    _: KW_ONLY
    sampling_params: SamplingParams | None = None
    priority: int | None = None
    key: str | None = None


class Pause(enum.Enum):
    """Yielded by an iterator of prompts that has no prompt yet.

    The engine runs a step of the running requests, then calls the iterator again. If no request is
    running, the stream ends; an iterator should block instead if it can detect this.
    """

    PAUSE = "PAUSE"
    COMPILING = "COMPILING"
    """The grammar of the next prompt is being compiled; the stream does not end."""


PAUSE = Pause.PAUSE


def is_single_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt, not a list of prompts. An empty list is not a prompt."""
    if isinstance(prompts, str | Mapping | Row):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(map(is_int, prompts))


def prompt_list(prompts: object) -> list[object]:
    """Converts `prompts` to a list with one entry per prompt.

    Raises:
        RequestError: it is neither a prompt nor a list of them.
    """
    prompts = plain_column(prompts)
    if is_single_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return list(prompts)
    raise RequestError(
        "prompts must be a string, a list of token ids, a dict, or a list of these, got"
        f" {type(prompts).__name__}; stream() also takes a generator of prompts"
    )


def plain_column(values: object) -> object:
    """Converts a NumPy array of strings or objects, or a column of a data frame, to a list; returns
    other values unchanged.

    Why not arrays of numbers: a rectangular array of token ids has padding, which is not text.
    """
    kind = getattr(getattr(values, "dtype", None), "kind", None)
    return values.tolist() if kind in ("O", "U", "T") else values  # type: ignore[attr-defined]


def conversation_list(messages: object) -> list[object]:
    """Converts one conversation (a list of dicts) or several to a list of conversations."""
    messages = plain_column(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            "messages must be a conversation (a list of {'role': ..., 'content': ...}) or a list"
            f" of conversations, got {type(messages).__name__}"
        )
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [messages]
    return list(messages)


def parse_prompt(prompt: object) -> dict[str, Any]:
    """Parses one prompt to a dict with keys of CONTENT_KEYS and TEMPLATE_KEYS, and "cache_salt". If
    it has both token ids and a text, the ids are used.

    `RequestChecker` checks later that ids are integers in the vocabulary.

    Raises:
        RequestError: wrong type, unknown or contradictory keys, no content; or the prompt itself,
            if it is an error.
    """
    if isinstance(prompt, RequestError):
        raise prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    return {"prompt_token_ids": _token_ids(prompt)}


def template_options(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The TEMPLATE_KEYS of a parsed prompt."""
    return {key: prompt[key] for key in TEMPLATE_KEYS if key in prompt}


def _parse_dict(prompt: Mapping[Any, Any]) -> dict[str, Any]:
    contents = [key for key in CONTENT_KEYS if prompt.get(key) is not None]
    known = (*CONTENT_KEYS, "cache_salt", *(TEMPLATE_KEYS if "messages" in contents else ()))
    for key, value in prompt.items():
        if key in NO_MEDIA and value:
            raise RequestError(
                f"{quoted(key)} must be None, because only text is supported, got {quoted(value)}"
            )
        if key not in known and key not in NO_MEDIA:
            raise RequestError(f"unknown key {quoted(key)} in the prompt; {nearest(key, known)}")
    if not contents or ("messages" in contents and len(contents) > 1):
        raise RequestError(
            "a prompt dict needs one of 'prompt', 'prompt_token_ids' and 'messages', got"
            f" {', '.join(map(repr, contents)) or 'none of them'}"
        )
    found = {key: prompt[key] for key in known if prompt.get(key) is not None}
    check_text("prompt", found.get("prompt"))
    if "messages" in found:
        from nanoengine.text.chats import parse_messages

        found["messages"] = parse_messages(found["messages"])
    if "prompt_token_ids" in found:
        found["prompt_token_ids"] = _token_ids(found["prompt_token_ids"])
    _check_template(found)
    return found


def _check_template(prompt: Mapping[str, Any]) -> None:
    """Checks the TEMPLATE_KEYS of a prompt."""
    check_text("chat_template", prompt.get("chat_template"))
    for key in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(prompt.get(key, True), bool):
            raise RequestError(f"{quoted(key)} must be True or False, got {quoted(prompt[key])}")
    tools = prompt.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) or callable(t) for t in tools):
        raise RequestError(f"'tools' must be a list of dicts or functions, got {quoted(tools)}")
    variables = prompt.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            f"'chat_template_kwargs' must be a dict with string keys, got {quoted(variables)}"
        )
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise RequestError(
                f"'chat_template_kwargs' can't set {quoted(name)}, which is a reserved name"
            )


def each_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: Callable[[], SamplingParams],
) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; None means `default()`.

    Raises:
        RequestError: a list of another length, or with wrong entries.
    """
    params = default() if params is None else params
    is_params = lambda value: isinstance(value, SamplingParams)  # noqa: E731
    return _one_each("sampling_params", params, count, is_params, "SamplingParams")


def each_priority(priority: int | Sequence[int] | None, count: int) -> list[int | None]:
    """One priority for each of `count` prompts; None means the priority of its SamplingParams."""
    if priority is None:
        return [None] * count
    return _one_each("priority", priority, count, is_int, "an integer")


def _one_each(
    name: str, values: Any, count: int, is_valid: Callable[[object], bool], kind: str
) -> list[Any]:
    if is_valid(values):
        return [values] * count
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RequestError(f"{name} must be {kind} or a list of them, got {quoted(values)}")
    if len(values) != count:
        raise RequestError(
            f"{name} must be a single value, or a list with one entry per prompt; got {len(values)}"
            f" for {count} prompts"
        )
    for i, value in enumerate(values):
        if not is_valid(value):
            raise RequestError(f"{name}[{i}] must be {kind}, got {quoted(value)}")
    return list(values)


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise RequestError(
            f"a prompt must be a string, a list of token ids or a dict, got {_kind(prompt)}"
        )
    return list(prompt)


def _kind(value: object) -> str:
    hint = "; call its tolist()" if hasattr(value, "tolist") else ""
    return f"{type(value).__name__}{hint}"
