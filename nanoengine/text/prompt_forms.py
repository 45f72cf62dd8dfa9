"""The forms of prompts, parameters and conversations that callers may pass.

`llm.py` calls it. It does not use the tokenizer or the engine: it only parses the arguments and
reports invalid ones.

    "text"                                     one prompt, not a list of characters
    [1, 2, 3]                                  one prompt of token ids
    {"prompt": "text"}                         a text with options: "cache_salt"
    {"prompt_token_ids": [1, 2, 3]}            a "prompt" in addition is only repeated in the output
    {"messages": [{"role": ..., ...}, ...]}    a conversation, and any of TEMPLATE_KEYS
    RequestError("...")                        a row that could not be read: its output's error
    PAUSE                                      from an iterator: no prompt at present
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
from nanoengine.settings.checks import checked, nearest, repr_short
from nanoengine.settings.params import SamplingParams

CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
TEMPLATE_KEYS = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
)
"""Options of `Tokenizer.render_chat`; the last one has the template's own variables."""

RESERVED_VARIABLES = ("messages", "conversation", "tokenize", *TEMPLATE_KEYS)
"""Names that template variables can't have, because they are arguments of the renderer."""

NO_MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of vLLM's prompts that are accepted if they are empty."""


class TextPrompt(TypedDict):
    """A text prompt with vLLM's name; a plain dict."""

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[None]


class TokensPrompt(TypedDict):
    """A prompt of token ids with vLLM's name; a plain dict."""

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
        key: identifies the row. A row without a seed draws its random numbers from the engine's
            seed and this key, independent of its order of arrival. So its tokens are the same
            alone, in any order, and after a resume. Rows with equal keys draw equal random numbers.
            `RequestOutput.key` repeats the key.

    Raises:
        RequestError: an option is unknown or has a wrong type; the call checks the prompt.
    """

    prompt: Any
    _: KW_ONLY
    sampling_params: SamplingParams | None = None
    priority: int | None = None
    key: str | None = None


class Pause(enum.Enum):
    """What a lazy iterator yields while it has no prompt yet.

    The engine continues with running requests, and asks again after the step. If nothing runs, the
    stream ends, so an iterator that can detect this should block instead.
    """

    PAUSE = "PAUSE"
    COMPILING = "COMPILING"
    """What the next prompt needs, such as a grammar, is being compiled; the stream does not end."""


PAUSE = Pause.PAUSE


def is_single_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt, not a collection of prompts; an empty list is none."""
    if isinstance(prompts, str | Mapping | Row):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(map(is_int, prompts))


def prompt_list(prompts: object) -> list[object]:
    """`prompts` as a list with one entry per prompt.

    Raises:
        RequestError: it is neither a prompt nor a list of them.
    """
    prompts = plain_column(prompts)
    if is_single_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return list(prompts)
    raise RequestError(
        "prompts must be a string, a list of token ids, a dict or a list of these, got"
        f" {type(prompts).__name__}; stream() also takes a generator of prompts"
    )


def plain_column(values: object) -> object:
    """A NumPy array of strings or objects, or a column of a data frame, as a list; else `values`.

    Why not numbers: a rectangular array of token ids contains padding, which is not text.
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
    """Parses one prompt to a dict of CONTENT_KEYS, "cache_salt" and TEMPLATE_KEYS. If it has token
    ids and a text, the ids are used.

    `RequestChecker` checks that ids are integers within the vocabulary.

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


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The TEMPLATE_KEYS of a parsed prompt."""
    return {key: given[key] for key in TEMPLATE_KEYS if key in given}


def _parse_dict(prompt: Mapping[Any, Any]) -> dict[str, Any]:
    given = [key for key in CONTENT_KEYS if prompt.get(key) is not None]
    known = (*CONTENT_KEYS, "cache_salt", *(TEMPLATE_KEYS if "messages" in given else ()))
    for key, value in prompt.items():
        if key in NO_MEDIA and value:
            raise RequestError(
                f"{repr_short(key)} must be None: this engine takes text alone, got"
                f" {repr_short(value)}"
            )
        if key not in known and key not in NO_MEDIA:
            raise RequestError(
                f"unknown key {repr_short(key)} in the prompt; {nearest(key, known)}"
            )
    if not given or ("messages" in given and len(given) > 1):
        raise RequestError(
            "a prompt dict needs one of 'prompt', 'prompt_token_ids' and 'messages', got"
            f" {', '.join(map(repr, given)) or 'none of them'}"
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


def _check_template(given: Mapping[str, Any]) -> None:
    """Checks the TEMPLATE_KEYS of a prompt."""
    check_text("chat_template", given.get("chat_template"))
    for key in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(given.get(key, True), bool):
            raise RequestError(
                f"{repr_short(key)} must be True or False, got {repr_short(given[key])}"
            )
    tools = given.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) or callable(t) for t in tools):
        raise RequestError(
            f"'tools' must be a list of descriptions, each a dict, got {repr_short(tools)}"
        )
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            f"'chat_template_kwargs' must be a dict by names, got {repr_short(variables)}"
        )
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise RequestError(
                f"'chat_template_kwargs' can't set {repr_short(name)}: no template's variable"
            )


def each_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: Callable[[], SamplingParams],
) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; None means `default()`.

    Raises:
        RequestError: a list of another length (both are named), or with wrong entries.
    """
    params = default() if params is None else params
    is_one = lambda one: isinstance(one, SamplingParams)  # noqa: E731
    return _one_each("sampling_params", params, count, is_one, "SamplingParams")


def each_priority(priority: int | Sequence[int] | None, count: int) -> list[int | None]:
    """One priority for each of `count` prompts; None means the one of its SamplingParams."""
    if priority is None:
        return [None] * count
    return _one_each("priority", priority, count, is_int, "an integer")


def _one_each(
    name: str, given: Any, count: int, is_one: Callable[[object], bool], kind: str
) -> list[Any]:
    if is_one(given):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"{name} must be {kind} or a list of them, got {repr_short(given)}")
    if len(given) != count:
        raise RequestError(
            f"{name} must be one for all prompts, or a list as long as the prompts: got"
            f" {len(given)} for {count} prompts"
        )
    for i, one in enumerate(given):
        if not is_one(one):
            raise RequestError(f"{name}[{i}] must be {kind}, got {repr_short(one)}")
    return list(given)


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise RequestError(
            f"a prompt must be a string, a list of token ids or a dict, got {_kind(prompt)}"
        )
    return list(prompt)


def _kind(value: object) -> str:
    hint = "; call its tolist()" if hasattr(value, "tolist") else ""
    return f"{type(value).__name__}{hint}"
