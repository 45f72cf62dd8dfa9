"""TokenizerFile: a tokenizer that needs only the tokenizers library.

Why: importing transformers takes longer than starting the engine with a small model. Plain text
needs only a GGUF file or a tokenizer.json, if transformers would encode it in the same way, which
load_tokenizer.py checks. `tokenizer.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RawTokenizer
    from transformers import PreTrainedTokenizerBase

    LoadFull = Callable[[], PreTrainedTokenizerBase]


class TokenizerFile:
    """The methods of a transformers tokenizer that are needed for plain text.

    Args:
        load_full: loads the transformers tokenizer, which has all other methods.
        eos_token: the name of the EOS token; None: there is none.

    Attributes:
        chat_template: the chat template of the checkpoint, unchanged.
    """

    chat_template: Any = None

    def __init__(self, raw: RawTokenizer, load_full: LoadFull, eos_token: str | None) -> None:
        self.load_full, self.eos_token = load_full, eos_token
        self.added_tokens_decoder: Mapping[int, AddedToken] = raw.get_added_tokens_decoder()
        self.all_special_ids: Sequence[int] = ()  # Why empty: all are in added_tokens_decoder.
        self.backend_tokenizer = raw

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, **no_cleaning: bool
    ) -> str:
        """The text of `token_ids`; `no_cleaning` has options of transformers that must be False."""
        assert not any(no_cleaning.values()), no_cleaning
        return str(
            self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of the token with this name; None: there is none."""
        token_id: int | None = self.backend_tokenizer.token_to_id(token)
        return token_id

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The name of a token."""
        name: str | None = self.backend_tokenizer.id_to_token(token_id)
        return name
