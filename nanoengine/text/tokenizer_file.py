"""A tokenizer.json read by the tokenizers library alone, where transformers would add nothing.

Called by `tokenizer.py`. Importing transformers takes longer than starting the engine on a small
model, and what a checkpoint saved by it needs for plain text is in one file. `find` accepts only
what it knows in full; for everything else transformers loads the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoengine.errors import ConfigError
from nanoengine.settings.json_file import read_object

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RawTokenizer

NAMED_TOKENS = {
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}  # fmt: skip

WITHOUT_EFFECT = {"chat_template", "clean_up_tokenization_spaces", "model_max_length"}
"""Settings that change neither the ids of a text nor the text of ids as nanoengine asks for it."""

MODEL_TYPES = {"gemma3_text", "llama", "qwen3", "qwen3_moe"}
"""Models for which transformers takes the tokenizer class that the checkpoint names. For qwen2 it
builds its own; for mistral it may take another library or patch the splitting of words."""

OLD_FILES = ("added_tokens.json", "special_tokens_map.json")
"""Files of older checkpoints that may add tokens."""


class TokenizerFile:
    """The part of a tokenizer of transformers that plain text needs, under the same names."""

    def __init__(self, raw: RawTokenizer, directory: Path) -> None:
        self.directory = directory
        self.added_tokens_decoder: Mapping[int, AddedToken] = raw.get_added_tokens_decoder()
        self.all_special_ids: Sequence[int] = ()  # All of them are among the added tokens.
        self.backend_tokenizer = raw

    @classmethod
    def find(cls, directory: Path) -> TokenizerFile | None:
        """The tokenizer of a checkpoint, if `tokenizer.json` says everything about it.

        None: transformers must load it, and explain what is wrong if something is.
        """
        try:
            config = read_object(directory / "tokenizer_config.json", ConfigError)
            model_type = read_object(directory / "config.json", ConfigError).get("model_type")
        except ConfigError:
            return None
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            return None
        named = [config.get(key) for key in NAMED_TOKENS if config.get(key) is not None]
        extra = config.get("extra_special_tokens", [])
        known = NAMED_TOKENS | WITHOUT_EFFECT | {"backend", "tokenizer_class"}
        if (
            config.get("tokenizer_class") != "TokenizersBackend"
            or config.get("backend") != "tokenizers"
            or config.keys() - known - {"extra_special_tokens"}
            or not isinstance(extra, list)
            or not all(isinstance(token, str) for token in [*named, *extra])
            or any((directory / name).exists() for name in OLD_FILES)
        ):
            return None
        from tokenizers import Tokenizer as RawTokenizer

        try:
            raw = RawTokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception:  # Why: the library raises nothing more exact.
            return None
        # Why: transformers turns truncation and padding off, fills in a missing post-processor, and
        # makes special tokens of those that the config names.
        if raw.truncation is not None or raw.padding is not None or raw.post_processor is None:
            return None
        special = {t.content for t in raw.get_added_tokens_decoder().values() if t.special}
        return cls(raw, directory) if special.issuperset([*named, *extra]) else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, **no_cleaning: bool
    ) -> str:
        """The text of `token_ids`, never cleaned up."""
        assert not any(no_cleaning.values()), no_cleaning
        return str(
            self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token's name; None: there is none."""
        token_id: int | None = self.backend_tokenizer.token_to_id(token)
        return token_id

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The name of a token."""
        name: str | None = self.backend_tokenizer.id_to_token(token_id)
        return name
