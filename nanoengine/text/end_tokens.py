"""Tokens that end an output in addition to the model's EOS ids, and token ids of bad words.

    turn_end_ids       of a chat: the token with which the template closes an assistant's message
    request_end_ids    of a request: stop strings that are special tokens, which decoded text lacks

It also warns if a text begins with BOS and the tokenizer adds BOS. The PromptReader calls it for
chats, and for requests with stop strings or bad words; tokenizer.py for the warning;
load_tokenizer.py for models without EOS tokens, and for `nanoengine info`. Each `tokenizer: Any` is
a `Tokenizer`, without its type to avoid a circular import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams

MARK = "nanoengine-marks-this-answer"
QUESTION = {"role": "user", "content": "nanoengine-marks-this-question"}
ANSWER = {"role": "assistant", "content": MARK}


def turn_end_ids(tokenizer: Any, chat_template: str | None) -> tuple[int, ...]:
    """The token with which a chat template closes an assistant's message; (): there is none.

    Spaces before it are ignored. If the template does not close the last message, the result is the
    token between the assistant's message and the next message of the user.
    """
    added = {token.content: i for i, token in tokenizer.backend.added_tokens_decoder.items()}
    options = {"chat_template": chat_template, "add_generation_prompt": False}
    # Why the last message first: gpt-oss closes others with a token that also ends reasoning.
    for messages in [QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION]:
        try:
            after = tokenizer.render_chat(messages, **options).partition(MARK)[2].lstrip()
        except RequestError:  # no template, or no support for this conversation
            continue
        if found := [content for content in added if content and after.startswith(content)]:
            return (added[max(found, key=len)],)
    return ()


def request_end_ids(
    tokenizer: Any, params: SamplingParams, turn_ids: Iterable[int]
) -> tuple[SamplingParams, dict[str, Any]]:
    """Returns the parameters of a request, and the arguments of `RequestChecker.check` with further
    end tokens and bad words. With min_tokens, the end tokens are added to stop_token_ids.

    Args:
        turn_ids: end tokens of the chat template; empty if the prompt is not a chat.
    """
    ends: dict[int, str | None] = {} if params.ignore_eos else dict.fromkeys(turn_ids)
    for stop in params.stop or ():
        if (token_id := tokenizer.token_id(stop)) in tokenizer.special_ids:
            ends[token_id] = stop
    if ends and params.min_tokens:
        params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    return params, {"ends": ends, "bad_word_ids": bad_word_ids(tokenizer, params.bad_words or ())}


def bad_word_ids(tokenizer: Any, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell `words`, at the start of a text and after a space.

    Source: vLLM's `SamplingParams.update_from_tokenizer`. vLLM drops the variant with a space if
    its length differs, so it allows " word" if only this variant is a single token.
    """
    spellings = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
    ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(sequence for sequence in ids if sequence))


def warn_of_two_bos(tokenizer: Any, token_ids: list[int]) -> None:
    """Warns, once per tokenizer, if a text begins with the BOS token that the tokenizer adds."""
    if token_ids and not tokenizer.has_warned and tokenizer.encode("")[:1] == token_ids[:1]:
        tokenizer.has_warned = True
        warnings.warn(
            f"a prompt begins with the text {tokenizer.token_text(token_ids[0])!r}, but the"
            " tokenizer also adds this token, so the model reads it twice, which changes outputs."
            " Remove it from the text, or pass token ids. This warning is shown once",
            stacklevel=2,
        )
