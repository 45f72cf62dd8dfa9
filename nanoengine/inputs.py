"""The forms in which a caller may give prompts, parameters and conversations.

Called by `llm.py`. Pure Python: it knows neither tokenizer nor engine, so it only sorts what was
given and names what is wrong with it.

    "text"                                     one prompt; never its characters
    [1, 2, 3]                                  one prompt of token ids
    {"prompt": "text"}                         the same with options: "cache_salt"
    {"prompt_token_ids": [1, 2, 3]}            "prompt" beside it is only repeated in the output
    {"messages": [{"role": ..., ...}, ...]}    a conversation, and any of TEMPLATE_KEYS
    [any of these, mixed]                      several prompts
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nanoengine.errors import RequestError
from nanoengine.sampling_params import SamplingParams

T = TypeVar("T")

CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
TEMPLATE_KEYS = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
)
"""Options of `Tokenizer.render_chat`; the last one holds variables of the template's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """One prompt as it was given: exactly one of ids, messages and text counts, in this order."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_args: Mapping[str, Any]
    cache_salt: str | None = None


def is_single_prompt(prompts: object) -> bool:
    """True if `prompts` is one prompt and not a collection of them; an empty list is none."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(map(_is_int, prompts))


def prompt_list(prompts: object) -> list[object]:
    """`prompts` as a list with one entry a prompt.

    Raises:
        RequestError: it is neither a prompt nor a list of them.
    """
    if is_single_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return list(prompts)
    raise RequestError(
        "prompts must be a string, a list of token ids, a dict or a list of these, got"
        f" {type(prompts).__name__}; stream() also takes a generator of prompts"
    )


def conversation_list(messages: object) -> list[object]:
    """One conversation (a list of dicts) or a list of conversations, as a list of these."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            "messages must be a conversation (a list of {'role': ..., 'content': ...}) or a list"
            f" of conversations, got {type(messages).__name__}"
        )
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [messages]
    return list(messages)


def parse_prompt(prompt: object) -> PromptInput:
    """Sorts one prompt.

    Raises:
        RequestError: wrong type, unknown or contradicting keys, no content.
    """
    if isinstance(prompt, str):
        return PromptInput(text=prompt, template_args={})
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    return PromptInput(token_ids=_token_ids(prompt), template_args={})


def _parse_dict(prompt: Mapping[Any, Any]) -> PromptInput:
    given = [key for key in CONTENT_KEYS if prompt.get(key) is not None]
    known = (*CONTENT_KEYS, "cache_salt", *(TEMPLATE_KEYS if "messages" in given else ()))
    for key in prompt:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise RequestError(f"unknown key {key!r} in the prompt; {hint}")
    if not given or ("messages" in given and len(given) > 1):
        raise RequestError(
            "a prompt dict needs one of 'prompt', 'prompt_token_ids' and 'messages', got"
            f" {', '.join(map(repr, given)) or 'none of them'}"
        )
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name!r} must be a string, got {type(value).__name__}")
    ids, messages = prompt.get("prompt_token_ids"), prompt.get("messages")
    return PromptInput(
        text=text,
        token_ids=None if ids is None else _token_ids(ids),
        messages=None if messages is None else _messages(messages),
        template_args={key: prompt[key] for key in TEMPLATE_KEYS if key in prompt},
        cache_salt=salt,
    )


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"a conversation must be a list of messages, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(
                f"a message must be a dict with 'role' and 'content', got {message!r}"
            )
    return [dict(message) for message in messages]


def each_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: Callable[[], SamplingParams],
) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; None means `default()`.

    Raises:
        RequestError: a list of another length, naming both, or of other things.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default()] * count
    if not isinstance(params, Sequence):
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, got {params!r}"
        )
    each = _one_each("sampling_params", params, count)
    for i, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{i}] must be SamplingParams, got {one!r}")
    return each


def each_priority(
    priority: int | Sequence[int] | None, params: Iterable[SamplingParams], count: int
) -> list[int]:
    """One priority for each prompt: the call's, or that of its SamplingParams."""
    if priority is None:
        return [one.priority for one in params]
    if isinstance(priority, Sequence) and not isinstance(priority, str):
        each = _one_each("priority", priority, count)
    else:
        each = [priority] * count
    if not all(map(_is_int, each)):
        raise RequestError(f"priority must be an integer or a list of them, got {priority!r}")
    return each


def _one_each(name: str, values: Sequence[T], count: int) -> list[T]:
    if len(values) != count:
        raise RequestError(
            f"{name} must be one for all prompts, or a list as long as the prompts: got"
            f" {len(values)} for {count} prompts"
        )
    return list(values)


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise RequestError(
            f"a prompt must be a string, a list of token ids or a dict, got {_kind(prompt)}"
        )
    for token_id in prompt:
        if not _is_int(token_id):
            raise RequestError(f"prompt token ids must be integers, got {token_id!r}")
    return [int(token_id) for token_id in prompt]  # NumPy's integers become Python's.


def _kind(value: object) -> str:
    hint = "; call its tolist()" if hasattr(value, "tolist") else ""
    return f"{type(value).__name__}{hint}"


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
