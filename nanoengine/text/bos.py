"""The warning of a text that begins with BOS, to which its tokenizer adds BOS.

Called by `Tokenizer.encode`, so for each kind of call that tokenizes a plain text. A chat needs
none: its text is encoded without special tokens, as its template has written them.
"""

from __future__ import annotations

import warnings
from typing import Any


def warn_of_two_bos(tokenizer: Any, token_ids: list[int]) -> None:
    """Warns, once per tokenizer, of a text that begins with the token that is put before it."""
    if token_ids and not tokenizer.has_warned and tokenizer.encode("")[:1] == token_ids[:1]:
        tokenizer.has_warned = True
        warnings.warn(
            f"a prompt begins with the text {tokenizer.token_text(token_ids[0])!r}, and the"
            " tokenizer adds that token itself: the model reads it twice, which changes answers."
            " Leave it out of the text, or pass token ids; this is said once",
            stacklevel=2,
        )
