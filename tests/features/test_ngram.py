"""The n-gram drafter: its index against a linear search, sharing between sequences, its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import ConfigError
from nanoengine.features.speculative.ngram import (
    NgramDrafter,
    NgramIndex,
    continuation,
    match_length,
)
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.speculative import MTPDrafts, NgramDrafts, parse_speculative

FEW_IDS = st.lists(st.integers(0, 3), max_size=40)


def search(token_ids: list[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """Returns (n, position) as the index does, by searching all positions."""
    end = len(token_ids)
    for n in range(min(longest, end), shortest - 1, -1):
        for position in range(end - 1, n - 1, -1):
            if token_ids[position - n : position] == token_ids[end - n :]:
                return n, position
    return None


@settings(max_examples=300, deadline=None)
@given(prompt=FEW_IDS, output=FEW_IDS, shortest=st.integers(1, 3), more=st.integers(0, 3))
def test_the_index_equals_a_linear_search(prompt, output, shortest, more):
    longest = shortest + more
    before = NgramIndex(shortest, longest)
    before.extend(prompt)
    index = NgramIndex(shortest, longest, before)
    for end in range(len(output) + 1):
        text = prompt + output[:end]
        index.extend(text)
        assert index.find() == search(text, shortest, longest)


@settings(max_examples=100, deadline=None)
@given(text=FEW_IDS.filter(len), place=st.data(), count=st.integers(1, 12))
def test_a_continuation_repeats_the_text_after_its_position(text, place, count):
    position = place.draw(st.integers(0, len(text) - 1))
    whole = list(text)
    for i in range(count):
        whole.append(whole[position + i])
    assert continuation(text, position, count) == tuple(whole[len(text) :])


def test_the_length_of_a_match_is_counted_up_to_the_limit():
    text = [*range(50, 80), 1, *range(50, 80)]
    assert match_length(text, 30, 4) == 16
    assert match_length([5, 1, 2, 3, 6, 1, 2, 3], 4, 2) == 3


def make_sequences(prompt: list[int], count: int, first_id: int = 0) -> list[Sequence]:
    request = Request("r", prompt, SamplingParams(n=count, max_tokens=100), max_num_tokens=1000)
    request.sequences = [
        Sequence(request, seq_id=first_id + i, index=i, token_ids=list(prompt))
        for i in range(count)
    ]
    return request.sequences


def drafts_of(drafter: NgramDrafter, sequences: list[Sequence]) -> list[tuple[int, ...]]:
    return [proposal.tokens for proposal in drafter.find_candidates(sequences)]


def test_sequences_of_a_request_share_only_the_index_of_the_prompt():
    one, other = make_sequences([1, 2, 3, 4, 5, 9, 9], 2)
    drafter = NgramDrafter(NgramDrafts(k=2))
    one.token_ids += [2, 3]
    other.token_ids += [7, 8]
    assert drafts_of(drafter, [one, other]) == [(4, 5), ()]
    assert drafter.num_tokens == 7 + 2 + 2, "the prompt is indexed once"
    other.token_ids += [6, 7, 8]
    one.token_ids += [7, 8]
    assert drafts_of(drafter, [one, other]) == [(), (6, 7)]
    one.finish("stop")
    drafter.drop_finished()
    assert drafter.num_tokens == 7 + 5
    other.finish("abort")
    drafter.drop_finished()
    assert drafter.num_tokens == 0


def test_the_indices_have_a_limit_and_finished_sequences_free_memory():
    drafter = NgramDrafter(NgramDrafts(), max_tokens=20)
    (first,) = make_sequences([1, 2, 3] * 4, 1)
    (second,) = make_sequences([4, 5, 6] * 4, 1, first_id=1)
    assert [bool(drafts) for drafts in drafts_of(drafter, [first, second])] == [True, False]
    first.finish("stop")
    assert drafts_of(drafter, [second]) == [(4, 5, 6, 4, 5, 6, 4, 5)]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ("ngram", NgramDrafts()),
        ("ngram:max=3,min=1,k=5", NgramDrafts(max=3, min=1, k=5)),
        ("mtp:k=2", MTPDrafts(k=2)),
    ],
)
def test_the_speculative_option_is_parsed(text, drafts):
    assert parse_speculative(text) == drafts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be 'ngram' or 'mtp', got ''"),
        ("ngram:min=5", r"1 <= min <= max <= 16 must hold, got min=5, max=4"),
        ("ngram:max=17", "got min=2, max=17"),
        ("ngram:k=0", r"k must be in \[1, 8\], got 0"),
        (
            "ngram:k=x",
            "the options of 'ngram' are max, min, k, integers, as in 'ngram:k=4'; got 'k=x'",
        ),
        ("ngram:n=3", "got 'n=3'"),
        ("some/model:k=3", "got 'some/model:k=3'; draft models are not supported"),
        ("mtp:max=3", "options of 'mtp' are k, .*got 'max=3'"),
    ],
)
def test_an_invalid_speculative_option_raises_and_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", speculative=text)
