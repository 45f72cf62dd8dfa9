"""Sequence: a prompt and its answer, and how much of them the KV cache holds.

    token_ids   [ p p p p p p p p | o o o ]     prompt, then sampled output
                          ^ num_computed_tokens  keys and values of the tokens before are in blocks

A step computes the next `num_tokens - num_computed_tokens` tokens, or as many of them as its budget
allows. For a new prompt that is the prompt's length, for a prompt in chunks what is left of it, and
for a sequence that generates 1: no flag tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.settings.params import SamplingParams

NO_ROW = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens.

    Attributes:
        seq_id: unique, in the order of arrival.
        token_ids: prompt and output.
        num_prompt_tokens: of them, the prompt's.
        max_num_tokens: prompt and output together end here.
        stop_ids: a sampled token of these ends the sequence.
        seed: of its random numbers.
        num_computed_tokens: tokens whose keys and values are in the KV cache, or are computed by
            the step that is being planned.
        num_cached_tokens: of them, found in the prefix cache at admission.
        block_table: entry i is the block that holds tokens i * block_size and following.
        digests: entry i names the content of block i and of all blocks before it.
        row: its place in the runner while it runs.
        finish_reason: "stop", "length", or None while it goes on.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_num_tokens: int
    stop_ids: frozenset[int]
    seed: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    row: int = NO_ROW
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens, the one that ended the sequence included."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Takes a sampled token, which may be the last."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.max_num_tokens:
            self.finish_reason = "length"
