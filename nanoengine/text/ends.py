"""Which tokens end an answer, as a checkpoint, its tokenizer, its chat template and a request say.

    with_ends      of a model: its config's EOS ids, and its tokenizer's, as in vLLM
    turn_ends      of a chat: the token with which the template closes an assistant's message
    request_ends   of a request: stop strings that are special tokens, which no text shows

Called by `build.py` and `nanoengine info`; by the PromptReader for chats, for requests with stop
strings, and for the ids of their bad words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoengine.errors import RequestError

if TYPE_CHECKING:
    from nanoengine.checkpoint.config import ModelConfig
    from nanoengine.settings.params import SamplingParams
    from nanoengine.text.tokenizer import Tokenizer

MARK = "nanoengine-marks-this-answer"
ASKED = {"role": "user", "content": "nanoengine-marks-this-question"}
ANSWERED = {"role": "assistant", "content": MARK}


def with_ends(
    model: ModelConfig, tokenizer: Tokenizer | None, *, chats: bool = False
) -> ModelConfig:
    """A model's config, its `ends` with what the tokenizer names besides.

    Args:
        tokenizer: None: it is not loaded, and names none.
        chats: also what the chat template closes a message with. It is asked in any case where
            nothing else names an end.
    """
    if tokenizer is None:
        return model
    ends = (*model.ends, ("the tokenizer", tokenizer.token_id(tokenizer.eos_token)))
    if chats or not (model := replace(model, ends=ends)).eos_token_ids:
        ends += tuple(("the chat template", token_id) for token_id in turn_ends(tokenizer, None))
    return replace(model, ends=ends)


def turn_ends(tokenizer: Tokenizer, chat_template: str | None) -> tuple[int, ...]:
    """The token with which a chat template closes an assistant's message; (): it has none.

    Spaces before it don't count. Where the template closes the last message with nothing, it is the
    token that comes before the user's next one.
    """
    added = {token.content: i for i, token in tokenizer.backend.added_tokens_decoder.items()}
    options = {"chat_template": chat_template, "add_generation_prompt": False}
    # Why the last message first: gpt-oss closes earlier ones with what also ends its reasoning.
    for messages in [ASKED, ANSWERED], [ASKED, ANSWERED, ASKED]:
        try:
            after = tokenizer.render_chat(messages, **options).partition(MARK)[2].lstrip()
        except RequestError:  # no template, or one that takes other conversations
            continue
        if found := [content for content in added if content and after.startswith(content)]:
            return (added[max(found, key=len)],)
    return ()


def request_ends(
    tokenizer: Tokenizer, params: SamplingParams, turns: Iterable[int]
) -> tuple[dict[int, str | None], SamplingParams]:
    """The ids that end a request beside the model's, and its parameters, with min_tokens for them.

    Args:
        turns: of the chat template; none for a prompt that is no chat.
    """
    ends: dict[int, str | None] = {} if params.ignore_eos else dict.fromkeys(turns)
    for stop in params.stop or ():
        if (token_id := tokenizer.token_id(stop)) in tokenizer.special_ids:
            ends[token_id] = stop
    if ends and params.min_tokens:
        params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    return ends, params


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell `words`, at the start of a text and after a space.

    Source: vLLM `SamplingParams.update_from_tokenizer`; it drops the variant with a space when
    its length differs, which lets " word" through where only that one is a single token.
    """
    spellings = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
    ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(spelled for spelled in ids if spelled))
