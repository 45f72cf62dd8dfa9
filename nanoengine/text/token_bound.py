"""TokenBound: a lower bound of the number of tokens of a text, without encoding it.

Encoding takes about 4 us and 300 bytes of memory per byte, in one call that can't be interrupted.
So a text that is far too long is rejected by a bound that needs one pass over its bytes:

    tokens of a text  >=  sum over its bytes of 1 / length of the longest token with this byte

Proof: a token of n bytes contributes at most 1/n per byte, so at most 1 in total. This requires
that each byte of the text is in a token. Characters that may disappear are not counted:

    NFC normalization        characters that may be composed, and the character before them
    added tokens that strip  whitespace
    other parts              if a part is unknown or drops text, there is no bound, and texts of any
                             length are encoded

The PromptReader calls it for long texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from nanoengine.text.tokenizer import BYTE_TOKENS, Tokenizer

INERT = "\0-\u02ff\u0400-\u0482\u3040-\u3098\u309b-\u9fff\uac00-\ud7a3"
"""Ranges of characters that NFC does not change, unless a character outside of them follows."""

COMPOSED = re.compile(f".?[^{INERT}]+", re.DOTALL)

MAX_GROWTH = 3
"""Factor by which a normalizer may increase the bytes of a text. Source: UAX #15 for NFC."""


class TokenBound:
    """Computes lower bounds for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            spec = json.loads(tokenizer.definition())
        except Exception:  # Why all: parts that are written in Python may raise anything.
            spec = {"model": {}}
        normalizers = _parts(spec.get("normalizer"))
        parts = [*normalizers, *_parts(spec.get("pre_tokenizer"))]
        self._composes = any(part["type"] == "NFC" for part in parts)
        self._strips = any(t["lstrip"] or t["rstrip"] for t in spec.get("added_tokens", ()))
        self._longest: list[int] | None = None
        if spec["model"].get("type") == "BPE" and all(map(_keeps_text, parts)):
            self._longest = _longest_tokens(spec, normalizers, parts)

    def lower_bound(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`; 0 if there is no bound."""
        if self._longest is None:
            return 0
        if self._composes and not text.isascii():
            text = COMPOSED.sub("", text)
        if self._strips:
            text = re.sub(r"\s+", "", text)
        counts = Counter(text.encode(errors="surrogatepass"))
        return int(sum(count / self._longest[byte] for byte, count in counts.items()))


def _parts(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Flattens a normalizer or a pre-tokenizer to a list."""
    if part is None or part["type"] != "Sequence":
        return [] if part is None else [part]
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [flat for nested in inner for flat in _parts(nested)]


def _keeps_text(part: dict[str, Any]) -> bool:
    """Whether a part keeps all characters of a text, and does not shorten it."""
    match part:
        case {"type": "NFC" | "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Prepend", "prepend": added}:
            return len(added.encode()) <= MAX_GROWTH
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            size = len(old.encode())
            return size <= len(new.encode()) <= size * MAX_GROWTH
    return False


def _longest_tokens(
    spec: dict[str, Any], normalizers: list[dict[str, Any]], parts: list[dict[str, Any]]
) -> list[int] | None:
    """For each byte value, the length of the longest token that may contain it [bytes]. None:
    unknown, because characters outside the vocabulary are dropped or merged."""
    from tokenizers.pre_tokenizers import ByteLevel

    model, vocab = spec["model"], spec["model"]["vocab"]
    # With ByteLevel, letters of the vocabulary represent bytes; most have the same code in Latin-1.
    in_letters = any(part["type"] == "ByteLevel" for part in parts)
    needed = set(ByteLevel.alphabet() if in_letters else BYTE_TOKENS)
    has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not needed <= vocab.keys() or has_affixes or not (in_letters or model.get("byte_fallback")):
        return None
    longest, minimum = [1] * 256, 1
    for token in vocab:
        size = len(token) if in_letters else len(token.encode())
        for byte in token.encode("latin-1", "ignore") if in_letters else token.encode():
            longest[byte] = max(longest[byte], size)
    for added in spec["added_tokens"]:
        content = added["content"].encode()
        for byte in content:
            longest[byte] = max(longest[byte], len(content))
        if added["normalized"] and normalizers:  # Why: it may match text with other bytes.
            num = len(normalizers)
            minimum = max(minimum, (len(content) + num) * MAX_GROWTH**num)
    maximum = max(minimum, *longest)
    unsure = {byte for byte in range(256) if in_letters and chr(byte) not in needed} | {*b" "}
    for part in parts:
        if part["type"] == "Replace":
            unsure |= {*part["pattern"]["String"].encode()}
    return [maximum if b in unsure else max(size, minimum) for b, size in enumerate(longest)]
