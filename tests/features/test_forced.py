"""Forced tokens as drafts: always right, before what another drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.core.plan import AdmittedSequence
from nanoengine.features.drafting import Guess
from nanoengine.features.forced import ForcedTokens
from tests.support.drafts import draft_always
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.processors import forced_text

NUM_TOKENS = 12
LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "is_hungry": {"type": "boolean"}},
        "required": ["animal", "is_hungry"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 3,
}


class Dictation:
    """A stage that has each row say its `forced_text`."""

    def admit(self, sequence: AdmittedSequence) -> Dictated:
        prompt = list(sequence.token_ids[: sequence.num_prompt_tokens])
        return Dictated(forced_text(prompt, 40), len(sequence.token_ids) - len(prompt))

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[Dictated]) -> None:
        for line, state in zip(lines, states, strict=True):
            token_id = state.text[state.done]
            kept = logits[line, token_id].item()
            logits[line] = -torch.inf
            logits[line, token_id] = kept


class Dictated:
    """How far a row has come. It tells three tokens ahead, and none at each fifth."""

    def __init__(self, text: list[int], done: int) -> None:
        self.text, self.done = text, done

    def accept(self, token_id: int) -> None:
        self.done += 1

    def fork(self) -> Dictated:
        return Dictated(self.text, self.done)

    def forced_tokens(self) -> list[int]:
        return self.text[self.done : self.done + 3] if self.done % 5 else []


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_processor_forces_is_drafted_and_right(overlap: bool) -> None:
    prompts = random_prompts(4, [1, 9, 20])
    engine = make_engine(
        checkpoint("qwen3"),
        logits_processors=[Dictation()],
        speculative="ngram:min=4",
        block_size=8,
        num_kv_blocks=9,
        overlap=overlap,
    )
    draft_always(engine)
    found = tokens(run(engine, prompts, greedy(NUM_TOKENS)))
    assert found == [[forced_text(prompt, NUM_TOKENS)] for prompt in prompts]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens == stats.accepted_tokens > 15, "an n-gram was not meant to be found"


def test_another_drafter_is_asked_where_nothing_is_forced() -> None:
    class Other:
        priors, always = (0.3, 0.4), False

        def look(self, sequences):
            return [Guess(5, 1) for _ in sequences]

        def draft(self, sequences, counts):
            return [(seq.row,) * count for seq, count in zip(sequences, counts, strict=True)]

        def forget_ended(self):
            pass

    drafter = ForcedTokens({0: [], 1: [7, 8, 9], 2: []}.__getitem__, Other())
    sequences = [SimpleNamespace(row=row) for row in range(3)]
    assert drafter.look(sequences) == [Guess(5, 1), Guess(3, 2), Guess(5, 1)]
    assert drafter.priors[2] == 1.0
    assert drafter.draft(sequences, [2, 2, 1]) == [(0, 0), (7, 8), (2,)]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_grammar_is_obeyed_and_saves_steps(backend: str) -> None:
    """Also where n-grams of the prompt leave the grammar."""
    pytest.importorskip(backend)
    from nanoengine import StructuredOutputs

    prompt = 'A list: [{"animal":"cow","is_hungry":1},{"animal":"cat","is_hungry":0}]. Another: '
    options = {"model": demo_model_path(), "max_model_len": 256}
    params = [
        SamplingParams(
            temperature=temperature,
            seed=3,
            max_tokens=120,
            structured_outputs=StructuredOutputs(json=LIST),
        )
        for temperature in (0.0, 1.0)
    ]
    with LLM(**options, grammar_backend=backend) as llm:
        expected = llm.generate([prompt, prompt], params, use_tqdm=False)
    with LLM(**options, grammar_backend=backend, speculative="ngram:min=1") as llm:
        draft_always(llm.engine)
        found = llm.generate([prompt, prompt], params, use_tqdm=False)
        stats = llm.stats()
    for one, other in zip(expected, found, strict=True):
        assert (other.error, other.outputs[0].token_ids) == (None, one.outputs[0].token_ids)
        assert other.outputs[0].finish_reason == "stop"
    assert stats.accepted_tokens > 20
