"""Sequence: a prompt and its answer, and how many of their tokens are in the KV cache.

    token_ids   [ p p p p p p p p | o o o ]     prompt, then sampled output
                          ^ num_computed_tokens  keys and values of earlier tokens are in blocks

A step computes the next `num_tokens - num_computed_tokens` tokens, limited by its budget. For a new
prompt this is the prompt's length, for a chunked prompt the remaining length, and for a decode 1;
there are no flags for these cases.
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
        num_prompt_tokens: number of prompt tokens among them.
        max_num_tokens: maximum length of prompt and output together.
        stop_ids: token ids that end the sequence when sampled.
        seed: seed of its random numbers.
        num_computed_tokens: tokens whose keys and values are in the KV cache, or are computed by
            the step that is being planned.
        num_cached_tokens: how many of them were in the prefix cache at admission.
        block_table: entry i is the block of tokens i * block_size and following.
        digests: entry i identifies the content of block i and of all blocks before it.
        row: its row in the runner while it runs.
        finish_reason: "stop", "length", or None while it is unfinished.
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
        """Number of tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens, including the one that ended the sequence."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Appends a sampled token, which may be the last."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.max_num_tokens:
            self.finish_reason = "length"
