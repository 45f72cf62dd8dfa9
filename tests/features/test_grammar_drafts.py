"""Forced tokens as drafts: always accepted, and preferred to drafts of another drafter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.features.speculative.drafting import DraftProposal
from nanoengine.features.speculative.grammar_drafts import GrammarDrafter
from tests.support.drafts import draft_always
from tests.support.engines import (
    checkpoint,
    finish,
    greedy,
    make_engine,
    random_prompts,
    run,
    tokens,
)
from tests.support.processors import Dictation, Foretold, forced_text

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


@pytest.mark.parametrize(
    "options", [{}, {"speculative": "ngram:min=4", "overlap": True}, {"speculative": "ngram:min=4"}]
)
def test_tokens_that_a_processor_forces_are_drafted_and_accepted(
    options: dict[str, object],
) -> None:
    """Also alone, without `speculative`."""
    prompts = random_prompts(4, [1, 9, 20])
    engine = make_engine(
        checkpoint("qwen3"),
        logits_processors=[Dictation()],
        block_size=8,
        num_kv_blocks=9,
        **options,
    )
    draft_always(engine)
    found = tokens(run(engine, prompts, greedy(NUM_TOKENS)))
    assert found == [[forced_text(prompt, NUM_TOKENS)] for prompt in prompts]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens == stats.accepted_tokens > 15, "an n-gram was drafted, too"


def test_the_drafter_is_not_called_without_rows_that_force_tokens() -> None:
    """Grammars of other requests add no cost to a request without one."""
    engine = make_engine(checkpoint("qwen3"), logits_processors=[Marked()])
    calls: list[int] = []
    propose = engine.proposer.propose
    engine.proposer = SimpleNamespace(
        needs_tokens=engine.proposer.needs_tokens,
        propose=lambda sequences: calls.append(len(sequences)) or propose(sequences),
    )
    run(engine, [[5], [6]], greedy(4))
    assert not calls
    run(engine, [[5], [7]], greedy(4))
    assert calls
    assert not engine.observers[0]._histories, "ended sequences are forgotten"
    assert make_engine(checkpoint("qwen3"), overlap=True).proposer is None
    assert make_engine(checkpoint("lfm2")).proposer is None


def test_an_exception_ends_only_the_request_that_raised_it() -> None:
    prompts = random_prompts(3, [4, 9])
    texts = dict(zip(map(tuple, prompts), map(forced_text, prompts, [40] * 3), strict=True))
    texts[tuple(prompts[1])] = []  # it fails at the first token that is requested
    engine = make_engine(checkpoint("qwen3"), logits_processors=[Foretold(texts, right=False)])
    draft_always(engine)
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts, greedy(NUM_TOKENS)))
    requests = [engine.add_request(f"{i}", p, greedy(NUM_TOKENS)) for i, p in enumerate(prompts)]
    finish(engine)
    assert (
        requests[1].error == "logits processor Foretold raised IndexError: list index out of range"
    )
    assert tokens(requests)[::2] == expected[::2]


class Marked(Dictation):
    """Forces the tokens of prompts that are the single token 7."""

    def admit(self, sequence):
        return super().admit(sequence) if list(sequence.token_ids[:1]) == [7] else None


def test_the_fallback_drafts_where_no_token_is_forced() -> None:
    class Fallback:
        priors, needs_every_step, eligible_rows = (0.3, 0.4), False, None

        def find_candidates(self, sequences):
            return [DraftProposal(5, 1) for _ in sequences]

        def drop_finished(self):
            pass

    forced = {0: [], 1: [7, 8, 9]}
    sampler = SimpleNamespace(jump_forward_rows=forced.keys(), forced_tokens=forced.__getitem__)
    drafter = GrammarDrafter(sampler, Fallback())
    sequences = [SimpleNamespace(row=row) for row in range(3)]
    assert drafter.find_candidates(sequences) == [
        DraftProposal(5, 1),
        DraftProposal(3, 2, (7, 8, 9)),
        DraftProposal(5, 1),
    ]
    assert len(drafter.priors) == 3


def test_drafts_of_a_grammar_save_steps_and_keep_the_output() -> None:
    """Also where n-grams of the prompt violate the grammar."""
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
    with LLM(**options) as llm:
        expected = llm.generate([prompt, prompt], params, use_tqdm=False)
    with LLM(**options, speculative="ngram:min=1") as llm:
        draft_always(llm.engine)
        found = llm.generate([prompt, prompt], params, use_tqdm=False)
        stats = llm.stats()
    for one, other in zip(expected, found, strict=True):
        assert (other.error, other.outputs[0].token_ids) == (None, one.outputs[0].token_ids)
        assert other.outputs[0].finish_reason == "stop"
    assert stats.accepted_tokens > 20
