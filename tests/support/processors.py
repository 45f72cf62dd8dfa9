"""Logits processors for tests, in a module that ranks can import."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from nanoengine.core.plan import AdmittedSequence

VOCAB_SIZE = 256


def forced_token(prompt: Sequence[int], output: Sequence[int]) -> int:
    """A token that depends on every token before it; never a special one."""
    return 3 + zlib.crc32(bytes([*prompt, 0, *output])) % (VOCAB_SIZE - 3)


def forced_text(prompt: Sequence[int], count: int) -> list[int]:
    """The output that `force` generates for any prompt."""
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
    """Returns an unchanged copy."""
    return logits.clone()


class Foretold:
    """A processor that changes nothing, and reports per row which tokens are forced next.

    Args:
        texts: prompt -> its output.
        right: if False, every fifth forecast is wrong.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], list[int]], right: bool = True) -> None:
        self.texts, self.right = texts, right

    def admit(self, sequence: AdmittedSequence) -> Place:
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        return Place(self.texts[prompt], len(sequence.token_ids) - len(prompt), self.right)

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[Place]) -> None:
        """Changes nothing."""


class Dictation(Foretold):
    """A processor that makes each row generate its `forced_text`."""

    def __init__(self) -> None:
        super().__init__({})

    def admit(self, sequence: AdmittedSequence) -> Place:
        prompt = list(sequence.token_ids[: sequence.num_prompt_tokens])
        return Place(forced_text(prompt, 40), len(sequence.token_ids) - len(prompt), True)

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[Place]) -> None:
        for line, state in zip(lines, states, strict=True):
            token_id = state.text[state.done]
            kept = logits[line, token_id].item()
            logits[line] = -torch.inf
            logits[line, token_id] = kept


class Place:
    """A row's position in its text. It forecasts three tokens, but none at each fifth position."""

    def __init__(self, text: list[int], done: int, right: bool) -> None:
        self.text, self.done, self.right = text, done, right

    def accept(self, token_id: int) -> None:
        self.done += 1

    def fork(self) -> Place:
        return Place(self.text, self.done, self.right)

    def forced_tokens(self) -> list[int]:
        if self.done % 5:
            return self.text[self.done : self.done + 3]
        return [] if self.right else [(self.text[self.done] + 1) % VOCAB_SIZE, 5]
