"""PromptReader: parses, renders, encodes and checks prompts.

    Row or plain prompt ── parse (forms) ── render, encode (tokenizer) ── check ── CheckedPrompt
                              └─── an invalid one raises with its index, or becomes a RefusedPrompt

`LLM` has one. It uses the tokenizer and the limits of the engine, and does not queue requests.
Special cases: prompt_forms.py (dicts, Rows, columns, lists of parameters), chats.py
(conversations).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from nanoengine.core.requests import RequestChecker
from nanoengine.core.sequence import Request
from nanoengine.errors import NanoEngineError, RequestError
from nanoengine.settings.checks import describe_error
from nanoengine.settings.params import SamplingParams
from nanoengine.text import prompt_forms
from nanoengine.text.prompt_forms import Row
from nanoengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoengine.text.chats import Chats

LONG_TEXT = 1 << 16
"""A longer text is first encoded in pieces of this length, which take 0.2 s each."""

OnError = Literal["raise", "record"]

ParamsInput = SamplingParams | Sequence[SamplingParams] | None
PriorityInput = int | Sequence[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPrompt:
    """A prompt that can be queued, its index in the call, and its text, if known."""

    index: int
    text: str | None
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPrompt:
    """A prompt that is invalid, and why; its text and token ids, as far as they are known."""

    index: int
    text: str | None
    token_ids: list[int]
    message: str
    key: str | None


class PromptReader:
    """Reads prompts for one engine.

    Args:
        tokenizer: None: prompts must be token ids.
        checker: checks requests against the limits of the engine.
        default_params: returns the parameters of prompts without parameters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        checker: RequestChecker,
        default_params: Callable[[], SamplingParams],
    ) -> None:
        self._tokenizer = tokenizer
        self.checker = checker
        self.default_params = default_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none.
        """
        if self._tokenizer is None:
            raise RequestError(
                "text needs a tokenizer, but this LLM was created with skip_tokenizer_init=True:"
                " pass prompts as token ids, without stop strings or bad_words"
            )
        return self._tokenizer

    def read_all(
        self,
        prompts: object,
        sampling_params: ParamsInput,
        priority: PriorityInput,
        on_error: OnError,
    ) -> list[CheckedPrompt | RefusedPrompt]:
        """Reads one prompt or a list. Parameters and priority are single values or lists."""
        check_on_error(on_error)
        items = [prompts] if isinstance(prompts, str) else prompts
        if not (type(items) is list and all(isinstance(item, str) for item in items)):
            items = prompt_forms.prompt_list(items)
        count = len(items)
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * count
        else:
            params = prompt_forms.each_params(sampling_params, count, self.default_params)
        priorities: list[int | None] = [None] * count
        if priority is not None:
            priorities = prompt_forms.each_priority(priority, count)
        return [
            self.read(i, *arguments, on_error)
            for i, arguments in enumerate(zip(items, params, priorities, strict=True))
        ]

    def read(
        self,
        index: int,
        prompt: object,
        params: SamplingParams,
        priority: int | None,
        on_error: OnError,
    ) -> CheckedPrompt | RefusedPrompt:
        """Reads one prompt. If it is invalid, raises with its index or returns a RefusedPrompt."""
        key: str | None = None
        text: str | None = None
        cache_salt: str | None = None
        token_ids: list[int] = []
        turn_ids: tuple[int, ...] = ()
        extra: dict[str, Any] = {}
        if isinstance(prompt, Row):
            params = params if prompt.sampling_params is None else prompt.sampling_params
            priority = priority if prompt.priority is None else prompt.priority
            key, prompt = prompt.key, prompt.prompt
        try:
            if isinstance(prompt, str):
                text = prompt
                token_ids = self._encode(prompt)
            else:
                parsed = prompt_forms.parse_prompt(prompt)
                text, cache_salt = parsed.get("prompt"), parsed.get("cache_salt")
                if "prompt_token_ids" in parsed:
                    token_ids = parsed["prompt_token_ids"]
                elif "messages" not in parsed:
                    token_ids = self._encode(text or "")
                else:
                    options = prompt_forms.template_options(parsed)
                    text = self._chats.render(parsed["messages"], options)
                    token_ids = self._encode(text, add_special_tokens=False)
                    turn_ids = self._chats.ends(parsed.get("chat_template"))
            if params.stop or params.bad_words or turn_ids:
                from nanoengine.text.end_tokens import request_end_ids

                params, extra = request_end_ids(self.tokenizer, params, turn_ids)
            request = self.checker.check(
                token_ids, params, priority=priority, key=key, cache_salt=cache_salt, **extra
            )
            return CheckedPrompt(index=index, text=text, request=request)
        except NanoEngineError as error:
            kind, message, cause = type(error), str(error), error.__cause__
        except Exception as error:  # Why all: Jinja or objects in the prompt may raise anything.
            kind, message, cause = RequestError, describe_error(error), error
        if on_error == "raise":
            raise kind(f"prompt {index}: {message}") from cause
        if not set(map(type, token_ids)) <= {int}:
            token_ids = []
        return RefusedPrompt(index=index, text=text, token_ids=token_ids, message=message, key=key)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text.

        Why pieces: one call takes 4 us and 300 bytes of memory per character, and can't be
        interrupted, so a text of 15 MB would be rejected after a minute and with 4 GiB. Half the
        tokens of the pieces is a safe lower bound: the pieces may have a few more tokens than the
        whole text.
        """
        num_tokens = 0
        for start in range(0, len(text), LONG_TEXT) if len(text) > LONG_TEXT else ():
            piece = text[start : start + LONG_TEXT]
            num_tokens += len(self.tokenizer.encode(piece, add_special_tokens=False))
            self.checker.check_length(num_tokens // 2, "at least ")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _chats(self) -> Chats:
        from nanoengine.text.chats import Chats

        return Chats(self.tokenizer)


def check_on_error(on_error: object) -> None:
    if on_error not in get_args(OnError):
        raise RequestError(f"on_error must be 'raise' or 'record', got {on_error!r:.200}")
