"""Tokenizer: converts whole texts to token ids and back; `text/stream.py` decodes growing text.

`llm.py` and `prompts.py` call it; the engine uses only token ids.
Special cases: load_tokenizer.py (transformers, if tokenizer.json is not complete),
chat_template.py (conversations).

Decoders strip a leading space, so "▁a" becomes "a". An output that continues a text must keep this
space, so that prompt + text is correct. Therefore its tokens are decoded after an anchor token,
whose text is then removed.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nanoengine.errors import RequestError
from nanoengine.text.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoengine.settings.config import EngineConfig
    from nanoengine.settings.params import SamplingParams

Message = dict[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}."""

REPLACEMENT = "\ufffd"
"""Decoders return it for bytes that are not UTF-8. At the end, the bytes may be an incomplete
character."""

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
"""Names of single-byte tokens in vocabularies with byte fallback."""


class Tokenizer:
    """A tokenizer of transformers or tokenizers, with the operations that the engine needs."""

    def __init__(self, backend: PreTrainedTokenizerBase | TokenizerFile) -> None:
        self._base = backend
        special_ids = {i for i, token in backend.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special_ids.union(backend.all_special_ids))
        self.eos_token, self.has_warned = backend.eos_token, False
        self.byte_ids = frozenset(map(self.token_id, BYTE_TOKENS)) - {None}
        self.anchor = self._find_anchor()
        self._anchor_len = len(self._raw(self.anchor))
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, name: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Loads the tokenizer of a checkpoint directory, GGUF file or hub id.

        Raises:
            ConfigError: there is none, or it can't be read.
            ModelError: a GGUF file is damaged.
        """
        from nanoengine.text.load_tokenizer import find_or_load

        return cls(find_or_load(name, trust_remote_code))

    @classmethod
    def of(cls, config: EngineConfig) -> Tokenizer:
        """Loads the tokenizer that an engine's settings name, or else the tokenizer of the model.

        Raises:
            ConfigError, ModelError: see `load`; or other files of the model are invalid.
        """
        from nanoengine.text.load_tokenizer import load_configured

        return cls(load_configured(config))

    @functools.cached_property
    def backend(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer, which is loaded at the first use."""
        plain = self._base
        return plain.load_full() if isinstance(plain, TokenizerFile) else plain

    @property
    def chat_template(self) -> Any:
        """The chat template, or a dict of name -> template; None: there is none."""
        return self._base.chat_template

    def definition(self) -> str:
        """The tokenizer in the format of tokenizer.json, with all its added tokens.

        Raises:
            RequestError: this kind of tokenizer can't be written in that format.
        """
        raw = getattr(self._base, "backend_tokenizer", None)
        if raw is None:
            kind = type(self._base).__name__
            raise RequestError(f"the tokenizer, a {kind}, is not from the tokenizers library")
        return str(raw.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the BOS that the tokenizer adds.

        Raises:
            RequestError: the text has lone surrogates, which can't be encoded; or a regular
                expression of the tokenizer fails.
        """
        try:
            token_ids = list(self._base.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text can't be encoded as UTF-8: {error!s:.200}") from error
        except BaseException as error:
            # Why by name: the class of Rust panics is not an Exception, and is not exported.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"the tokenizer failed on the text: {error!s:.200}") from error
        if add_special_tokens and token_ids[:1] == token_ids[1:2]:
            from nanoengine.text.end_tokens import warn_of_two_bos

            warn_of_two_bos(self, token_ids)
        return token_ids

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Renders a conversation with the chat template.

        The result already has special tokens: encode it with `add_special_tokens=False`.

        Args:
            options: chat_template, add_generation_prompt, continue_final_message, tools (see
                `render_conversation`), and the template's own variables.

        Raises:
            RequestError: there is no template, or it raises an error, or it needs more time or
                memory than `text/rendering.py` allows.
        """
        from nanoengine.text.chat_template import CHATS, render_conversation

        CHATS.begin()  # Why first: the process starts while the tokenizer loads.
        return render_conversation(self.backend, messages, **options)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, anchored: bool = True
    ) -> str:
        """The text of `token_ids` after other text, or at the start of a text if not `anchored`."""
        if skip_special_tokens:
            # Why: the library does not skip special tokens that are marked as normalized.
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
        """The text of a whole output at once; equals the final text of a `TextStream`.

        Args:
            end_ids: EOS and stop ids. The text of the id that ends the output is not included,
                unless `include_stop_str_in_output` is set.
        """
        if token_ids and token_ids[-1] in end_ids and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self.decode(
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            anchored=self.is_anchored(prompt_token_ids),
        )

    def token_id(self, name: str | None) -> int | None:
        """The id of the token with this name; None: there is none."""
        found = self._base.convert_tokens_to_ids(name) if name else None
        # Why check: for a missing name, the result is None or the id of <unk>.
        known = isinstance(found, int) and self._base.convert_ids_to_tokens(found) == name
        return found if known else None

    def token_text(self, token_id: int) -> str:
        """The text of one token, with its leading space, or the name of a special token. Cached."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def is_anchored(self, prompt_token_ids: Iterable[int]) -> bool:
        """Whether the prompt has text, so the output is not at the start of a text."""
        return any(token_id not in self.special_ids for token_id in prompt_token_ids)

    def _raw(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # Why no clean-up: it replaces " ." by ".", which changes the output of the model.
        text = self._base.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text if isinstance(text, str) else "".join(text)

    def _find_anchor(self) -> list[int]:
        """A token with plain text, after which decoders keep leading spaces."""
        for text in ("a", "the", "0", "."):
            for token_id in reversed(self.encode(text, add_special_tokens=False)):
                if token_id not in self.byte_ids and self._raw([token_id]).strip() == text:
                    return [token_id]
        return []
