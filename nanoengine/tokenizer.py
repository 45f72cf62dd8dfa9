"""Text in and out: encode, chat templates, incremental detokenization, stop strings.

Called by `llm.py` alone; the engine below sees token ids and an `OutputFollower`. No other file
imports transformers, and this one only where `tokenizer_file.py` is not enough: for chat templates,
and for tokenizers that are more than a tokenizer.json.

Why decoding token by token is not trivial, and what is done here:

    a character spans tokens     "€" = [E2] [82 AC]   text that ends in U+FFFD waits for more tokens
    byte fallback is not local   "\\n" + [FF] = "��"   a run of byte tokens waits until it is closed
    a leading space is stripped  "▁a" -> "a"          windows are decoded behind an anchor token
    a stop string spans tokens   "\\n" + "User"        looked for in the text, not in the tokens

The text of an output is what its tokens add to a prompt that has text. So it keeps the space of a
first "▁word", and prompt + text reads well.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.errors import ConfigError, RequestError
from nanoengine.time_limit import call_within
from nanoengine.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoengine.sampling_params import SamplingParams

Message = dict[str, Any]
"""One turn of a conversation: {"role": ..., "content": ...}."""

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no UTF-8; at the end it may be half of a character."""

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
"""Names of the tokens of one byte in vocabularies with byte fallback."""

MAX_OPEN_TOKENS = 8
"""Longest window that waits for a character; one has at most 4 bytes, so at most 4 tokens."""


RENDER_S = 5.0
"""Longest time that a chat template may take. A real one takes less than a millisecond."""


class Tokenizer:
    """A Hugging Face tokenizer behind the few operations that the engine needs."""

    def __init__(self, backend: PreTrainedTokenizerBase | TokenizerFile) -> None:
        self._plain = backend
        added = backend.added_tokens_decoder.items()
        special_ids = [token_id for token_id, token in added if token.special]
        self.special_ids = frozenset([*backend.all_special_ids, *special_ids])
        ids = [backend.convert_tokens_to_ids(name) for name in BYTE_TOKENS]
        found = zip(ids, BYTE_TOKENS, strict=True)
        self.byte_ids = (
            frozenset(  # Why the second look: a missing name gives None or the id of <unk>.
                i
                for i, name in found
                if isinstance(i, int) and backend.convert_ids_to_tokens(i) == name
            )
        )
        self.anchor = self._find_anchor()
        self._anchor_len = len(self._raw(self.anchor))
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(
        cls, name: str, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """Loads the tokenizer of a checkpoint directory or hub id.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        directory = Path(name)
        if directory.is_dir():
            _refuse_special_files(directory)
        file = TokenizerFile.find(directory)
        return cls(file or _load_backend(name, revision, trust_remote_code))

    @functools.cached_property
    def backend(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers, which is loaded now if plain text did not need it."""
        if isinstance(self._plain, TokenizerFile):
            return _load_backend(str(self._plain.directory))
        return self._plain

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the BOS that the tokenizer adds.

        Raises:
            RequestError: the text holds lone surrogates, which no encoding has.
        """
        try:
            return list(self._plain.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text can't be encoded as UTF-8: {error}") from error

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """The prompt that the model's chat template makes of a conversation.

        It holds its special tokens already: encode it with `add_special_tokens=False`.

        Raises:
            RequestError: there is no template, it refuses these messages, or it takes longer than
                `RENDER_S`.
        """
        backend = self.backend  # Why here: loading it is not the template's time.
        if chat_template is None and not backend.chat_template:
            raise RequestError(
                "this model's tokenizer has no chat template: pass chat_template=..., or call"
                " generate() with the prompt as text"
            )

        def render() -> object:
            _refuse_powers(backend.get_chat_template(chat_template, tools))
            return backend.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_args,
            )

        try:
            text = call_within(RENDER_S, render)
        except Exception as error:  # Why: templates are programs; jinja2 and they raise anything.
            raise RequestError(f"the chat template refused the conversation: {error}") from error
        return str(text)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, anchored: bool = True
    ) -> str:
        """The text that `token_ids` add behind other text, or from the start if not `anchored`."""
        if skip_special_tokens:
            # Why here too: the library keeps special tokens that are marked as normalized.
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        if not anchored:
            return self._raw(token_ids, skip_special_tokens)
        return self._raw([*self.anchor, *token_ids], skip_special_tokens)[self._anchor_len :]

    def output_text(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        end_ids: Container[int] = (),
    ) -> str:
        """The text of a whole output at once; what a `TextStream` of the same tokens ends with.

        Args:
            end_ids: EOS and stop ids; the text of one that ends the output is no part of it unless
                `include_stop_str_in_output`.
        """
        if token_ids and token_ids[-1] in end_ids and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self.decode(
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            anchored=self.is_anchored(prompt_token_ids),
        )

    def token_text(self, token_id: int) -> str:
        """One token as text, with its leading space, special tokens by name; cached."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def is_anchored(self, prompt_token_ids: Iterable[int]) -> bool:
        """True if the prompt has text, so that an output's first token does not begin a text."""
        return any(token_id not in self.special_ids for token_id in prompt_token_ids)

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell `words`, at the start of a text and after a space.

        Source: vLLM `SamplingParams.update_from_tokenizer`; it drops the variant with a space when
        its length differs, which lets " word" through where only that one is a single token.
        """
        spellings = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
        ids = (tuple(self.encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(spelled for spelled in ids if spelled))

    def _raw(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # Why: clean-up rewrites " ." to "." across token borders; we show what the model wrote.
        text = self._plain.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text if isinstance(text, str) else "".join(text)

    def _find_anchor(self) -> list[int]:
        """One token with plain text; decoding behind it shows the spaces that follow."""
        for text in ("a", "the", "0", "."):
            for token_id in reversed(self.encode(text, add_special_tokens=False)):
                if token_id not in self.byte_ids and self._raw([token_id]).strip() == text:
                    return [token_id]
        return []


def _load_backend(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    way_out = (
        "give tokenizer=... another directory or hub id, or set skip_tokenizer_init=True and pass"
        " token ids"
    )
    try:
        found = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ConfigError(f"tokenizer {name!r} can't be loaded: {error}\n{way_out}") from error
    # Why: without its files transformers makes a tokenizer of special tokens alone.
    if len(found) <= len(found.added_tokens_decoder):
        raise ConfigError(
            f"{name!r} has no tokenizer: no tokenizer.json, tokenizer.model or vocab.json with a"
            f" vocabulary; {way_out}"
        )
    return found


def _refuse_special_files(directory: Path) -> None:
    """Raises for a FIFO, socket or device in the directory, which would block its reader.

    Why all files: transformers decides which of them it opens.
    """
    for path in sorted(directory.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link that leads nowhere can't be opened either
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is no regular file: a checkpoint has no use for it")


@functools.lru_cache
def _refuse_powers(template: str) -> None:
    """Refuses `x ** y` of a chat template, which none needs and which may take for ever in one
    call into C. `**` that hands on arguments is left alone."""
    import jinja2

    before = ""
    for _, kind, value in jinja2.Environment().lex(template):
        if value == "**" and kind == "operator" and before not in ("(", ","):
            raise ValueError("a template may not compute powers")
        if kind != "whitespace":
            before = value


class TextStream:
    """Text of one growing output: the `OutputFollower` of stop strings and of streaming.

    `text` only ever grows, so a reader may print it piece by piece; what it holds at the end equals
    the one-shot decode of the same tokens, cut at the stop string.

    A stop string ends the output at the first token whose text completes one. Of several in that
    token's text the earliest end wins, then the order of `params.stop`; which one wins does
    therefore not depend on how the text was cut into tokens.

    Args:
        end_ids: EOS and stop ids; they end the output, and their own text is no part of it unless
            `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        end_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        self._anchored = tokenizer.is_anchored(prompt_token_ids)
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        ends = frozenset() if params.include_stop_str_in_output else frozenset(end_ids)
        self._silent_ids = skipped | ends
        self._num_tokens = 0
        self._window: list[int] = []  # tokens whose text is not settled
        self._settled = ""  # text that no later token can change
        self._num_checked = 0  # characters in which no stop string may end any more
        self._final: str | None = None

    @property
    def text(self) -> str:
        """The text so far that is sure to stay: settled, and not the beginning of a stop string."""
        if self._final is not None:
            return self._final
        return self._settled[: len(self._settled) - self._num_held()]

    def append(self, token_id: int) -> str | None:
        """Takes the next token; returns the stop string that it completes."""
        self._num_tokens += 1
        if token_id in self._silent_ids:
            return None
        self._window.append(token_id)
        is_open_run = token_id in self._tokenizer.byte_ids
        if is_open_run and not self._stops:
            return None  # Perf: nobody reads unsettled text, so a run is decoded once.
        if len(self._window) == 1 and self._anchored:
            tail = self._tokenizer.token_text(token_id)  # Perf: cached; 0.9 us, not 5, on Zen 3.
        else:
            tail = self._decode(self._window)
        if not is_open_run and not tail.endswith(REPLACEMENT):
            self._settle(len(self._window), tail)
            tail = ""
        elif not is_open_run and len(self._window) > MAX_OPEN_TOKENS:
            tail = self._settle_early(tail)
        return self._find_stop(tail.rstrip(REPLACEMENT)) if self._stops else None

    def finish(self, token_ids: Sequence[int] | None = None) -> str:
        """The whole text, after the last token; a character left incomplete shows as U+FFFD.

        `token_ids` are all tokens of the output: those not appended yet are taken first. The engine
        does not append the id that ends an output.
        """
        for token_id in (token_ids or ())[self._num_tokens :]:
            self.append(token_id)
        if self._final is None:
            self._final = self._settled + self._decode(self._window)
        return self._final

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            anchored=self._anchored,
        )

    def _settle(self, num_tokens: int, text: str) -> None:
        if text:  # Why: until there is text, the next token still begins it.
            self._settled += text
            self._anchored = True
            del self._window[:num_tokens]

    def _settle_early(self, tail: str) -> str:
        """Settles all but the last tokens of a long window of broken bytes."""
        cut = len(self._window) - 4
        head = self._decode(self._window[:cut])
        rest = self._tokenizer.decode(
            self._window[cut:], skip_special_tokens=self._params.skip_special_tokens
        )
        if head and head + rest == tail:
            self._settle(cut, head)
            return rest
        return tail

    def _find_stop(self, tail: str) -> str | None:
        """Looks for stop strings in settled text + `tail`; a find makes the text final."""
        text = self._settled + tail
        if self._num_tokens < self._params.min_tokens:
            self._num_checked = len(text)
            return None
        found = []
        for order, stop in enumerate(self._stops):
            at = text.find(stop, max(0, self._num_checked - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), order, at))
        self._num_checked = max(self._num_checked, len(self._settled))
        if not found:
            return None
        end, order, start = min(found)
        self._final = text[: end if self._params.include_stop_str_in_output else start]
        return self._stops[order]

    def _num_held(self) -> int:
        """Length of the longest end of the settled text that begins a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._settled)), 0, -1):
            if any(stop.startswith(self._settled[-length:]) for stop in self._stops):
                return length
        return 0
