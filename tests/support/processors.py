"""Logits processors for tests, in a module that ranks can import."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

VOCAB_SIZE = 256


def forced_token(prompt: Sequence[int], output: Sequence[int]) -> int:
    """A token that depends on every token before it; never a special one."""
    return 3 + zlib.crc32(bytes([*prompt, 0, *output])) % (VOCAB_SIZE - 3)


def forced_text(prompt: Sequence[int], count: int) -> list[int]:
    """What `force` makes of any prompt."""
    output: list[int] = []
    while len(output) < count:
        output.append(forced_token(prompt, output))
    return output


def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Bans all tokens but one."""
    token_id = forced_token(prompt, output)
    only = torch.full_like(logits, -torch.inf)
    only[token_id] = logits[token_id]
    return only


def either(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Bans all tokens but two, in place."""
    first = forced_token(prompt, output)
    kept = [first, 3 + (first + 1) % (VOCAB_SIZE - 3)]
    values = logits[kept]
    logits[:] = -torch.inf
    logits[kept] = values
    return logits


def as_they_are(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Edits nothing, on a copy."""
    return logits.clone()
