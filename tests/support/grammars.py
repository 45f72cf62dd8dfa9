"""A tiny checkpoint whose 320 tokens are text, for tests of grammars."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoengine.core.plan import AdmittedSequence
from nanoengine.features.structured import Structured
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer
from tests.support.engines import checkpoint

SPECIAL = ("<unk>", "<s>", "</s>")
EOS = 2
VOCAB_SIZE = 320
MERGES = (
    '{ "|" :|" ,|" }|[ {|} ]|} ,|": "|": {|": [|", "|{ }|[ ]|1 2|0 0|- 1|. 5|t r|tr ue|u e|f a|l s|'
    "ls e|fa lse|n u|l l|nu ll|a n|an d|t h|th e|i n|e r|o n|r e|\\ n|\\ u|Ġ a|Ġ the|Ġ {"
)


@functools.cache
def text_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, pieces of JSON and words, and an `</s>`: 320 tokens."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = [tuple(pair.split(" ")) for pair in MERGES.split("|")]
    vocab: dict[str, int] = {}
    for entry in (*SPECIAL, *sorted(shown.alphabet()), *("".join(pair) for pair in merges)):
        vocab.setdefault(entry, len(vocab))
    for i in range(len(vocab), VOCAB_SIZE):
        vocab[f"w{i}"] = i
    raw = RawTokenizer(
        models.BPE(vocab=vocab, merges=[m for m in merges if all(p in vocab for p in m)])
    )
    raw.pre_tokenizer = shown
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    assert raw.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


@functools.cache
def text_checkpoint(family: str = "qwen3") -> str:
    """The tiny checkpoint of a family, with this tokenizer."""
    directory = checkpoint(family, vocab_size=VOCAB_SIZE)
    text_tokenizer().save_pretrained(directory)
    return directory


def make_grammar_processor(tokenizer: Tokenizer | None = None) -> Structured:
    """The logits processor of structured outputs for this tokenizer, or one that extends it."""
    from nanoengine.features.llguidance_grammars import LLGuidance

    tokenizer = tokenizer or Tokenizer(text_tokenizer())
    make = functools.partial(LLGuidance, tokenizer, VOCAB_SIZE, (EOS,))
    return Structured(make, VOCAB_SIZE, (EOS,))


class AnyText:
    """A fake grammar library. Its only grammar allows every token, or every even one, and an end
    anywhere."""

    def __init__(self, mask: int = -1) -> None:
        self.mask = mask

    def compile(self, spec: StructuredOutputs) -> AnyText:
        return self

    def fill(self, grammars: Sequence[AnyText], masks: np.ndarray) -> None:
        masks[:] = self.mask

    def accept(self, token_id: int) -> None:
        """Ignores the token."""

    def fork(self) -> AnyText:
        return self


def any_text(*args: object) -> AnyText:
    """Replaces `features.structured._library`."""
    return AnyText()


def even_text(*args: object) -> AnyText:
    """The same for even tokens only."""
    return AnyText(0x55555555)


class Rows:
    """Rows of a sampler with this tokenizer and random logits."""

    def __init__(self, params: Sequence[SamplingParams], seed: int = 0):
        processor = make_grammar_processor()
        for one in params:
            processor.check(one)
        self.sampler = Sampler(VOCAB_SIZE, len(params), (EOS,), (processor,))
        self.params, self.random = list(params), torch.Generator().manual_seed(seed)
        self.outputs: list[list[int]] = [[] for _ in params]
        self.errors: dict[int, str] = {}
        for row in range(len(params)):
            self.admit(row)

    def admit(self, row: int) -> None:
        """Admits a row, or admits it again with its current output."""
        known = [EOS + 1, *self.outputs[row]]
        one = self.params[row]
        self.sampler.admit(AdmittedSequence(row, row, known, 1, 0, one, seed=row))

    @property
    def running(self) -> list[int]:
        return [
            row
            for row, output in enumerate(self.outputs)
            if row not in self.errors
            and len(output) < (self.params[row].max_tokens or 0)
            and EOS not in output
        ]

    def step(self, favour: Mapping[int, float] | None = None) -> None:
        """Samples one token per running row; `favour` is added to the logits."""
        rows = self.running
        logits = 3 * torch.randn(len(rows), VOCAB_SIZE, generator=self.random)
        for token_id, bonus in (favour or {}).items():
            logits[:, token_id] += bonus
        positions = [1 + len(self.outputs[row]) for row in rows]
        found = self.sampler.sample(logits, rows, positions).fetch()
        for line, row in enumerate(rows):
            if line in found.errors:
                self.errors[row] = found.errors[line]
            else:
                self.outputs[row].append(found.token_ids[line])
        for i, processor_states in self.sampler.states_of(rows).items():
            processor_states.accept(found.token_ids[i : i + 1])

    def text(self, row: int) -> str | None:
        """The text of a completed row, else None."""
        output = self.outputs[row]
        if not output or output[-1] != EOS:
            return None
        return Tokenizer(text_tokenizer()).decode(output[:-1], anchored=False)
