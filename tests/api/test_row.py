"""Row: a prompt with its own parameters, priority and key; unset fields come from the call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoengine import LLM, BeamSearchParams, RequestError, RequestOutput, Row, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.llm import LOOK_AHEAD
from tests.support.fake_llm import ANSWERS, LONG, MakeLLM, assert_idle, texts

Call = Callable[..., list[RequestOutput]]


def generate(llm: LLM, rows: list[Any], *args: Any, **options: Any) -> list[RequestOutput]:
    return llm.generate(rows, *args, use_tqdm=False, **options)


def stream_a_list(llm: LLM, rows: list[Any], *args: Any, **options: Any) -> list[RequestOutput]:
    return sorted(llm.stream(rows, *args, **options), key=lambda output: output.index)


def stream_an_iterator(
    llm: LLM, rows: list[Any], *args: Any, **options: Any
) -> list[RequestOutput]:
    return stream_a_list(llm, iter(rows), *args, **options)  # type: ignore[arg-type]


every_call = pytest.mark.parametrize("call", [generate, stream_a_list, stream_an_iterator])


@every_call
def test_parameters_of_a_row_override_those_of_the_call(llm: LLM, call: Call) -> None:
    """A row without parameters uses the call's; plain prompts may be mixed in."""
    own = SamplingParams(temperature=0, max_tokens=2)
    rows = [Row("€", sampling_params=own, key="a"), "€", Row("€"), Row({"prompt": "dog"}, key="d")]
    outputs = call(llm, rows, LONG)
    assert [len(o.outputs[0].token_ids) for o in outputs[:3]] == [2, *[len(executed(llm))] * 2]
    assert texts(outputs[1:]) == [ANSWERS["€"], ANSWERS["€"], ANSWERS["dog"]]
    assert [o.key for o in outputs] == ["a", None, None, "d"]
    assert [o.prompt for o in outputs] == ["€", "€", "€", "dog"]
    assert_idle(llm)


def executed(llm: LLM) -> list[int]:
    """Returns the tokens of the longest answer, with its EOS."""
    return [*llm.tokenizer.encode(ANSWERS["€"], add_special_tokens=False), 0]


@every_call
def test_a_row_without_parameters_uses_the_models_defaults(make_llm: MakeLLM, call: Call) -> None:
    with make_llm(ANSWERS, generation_defaults={"temperature": 0, "max_tokens": 3}) as llm:
        (one, other) = call(llm, [Row("€"), Row("€", sampling_params=LONG)])
        assert len(one.outputs[0].token_ids) == 3
        assert other.outputs[0].text == ANSWERS["€"]


@every_call
def test_priorities_come_from_the_row_then_the_call_then_the_parameters(
    make_llm: MakeLLM, call: Call
) -> None:
    last = SamplingParams(temperature=0, priority=9)
    with make_llm(ANSWERS, max_num_seqs=1) as llm:
        seen: list[int] = []
        add = llm.engine.scheduler.add
        llm.engine.scheduler.add = lambda request, **options: (
            seen.append(request.priority),
            add(request, **options),
        )[1]
        rows = [Row("one", priority=0), Row("one", sampling_params=last), "one"]
        call(llm, rows, LONG)
        call(llm, rows, last, priority=4)
        assert seen == [0, 9, 0, 0, 4, 4]
        order = [output.index for output in llm.stream(rows, LONG, priority=[3, 2, 1])]
        assert order == [0, 2, 1], "lower runs first"


def test_a_generator_is_read_only_as_far_as_needed(make_llm: MakeLLM) -> None:
    num_read = 0

    def source() -> Iterator[Row]:
        nonlocal num_read
        for number in range(300):
            num_read += 1
            yield Row("dog", sampling_params=LONG, key=str(number))

    with make_llm(ANSWERS, max_num_seqs=4) as llm:
        for finished, output in enumerate(llm.stream(source()), 1):
            assert (output.key, output.outputs[0].text) == (str(output.index), ANSWERS["dog"])
            assert num_read - finished <= 4 + LOOK_AHEAD
        assert finished == 300


def test_a_beam_search_accepts_rows_without_sampling_parameters(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    plain = llm.beam_search("one", params, use_tqdm=False)
    assert llm.beam_search(Row("one", key="a"), params, use_tqdm=False) == plain
    with pytest.raises(RequestError, match="a beam search does not sample"):
        llm.beam_search([Row("one", sampling_params=LONG)], params, use_tqdm=False)
    assert_idle(llm)


def test_each_prompt_is_checked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was checked when it was read and again when it was queued."""
    checked: list[list[int]] = []
    check = llm.engine.checker.check

    def counted(token_ids: list[int], *args: Any, **options: Any) -> Any:
        checked.append(token_ids)
        return check(token_ids, *args, **options)

    monkeypatch.setattr(llm.engine.checker, "check", counted)
    prompts = ["one", [5, 6], Row("dog")]
    generate(llm, prompts, LONG)
    assert len(checked) == 3
    list(llm.stream(iter(prompts), LONG))
    assert len(checked) == 6
    llm.beam_search(["one", "dog"], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
    assert len(checked) == 8


# --- seeds ----------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=1.0, n=2, max_tokens=12)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(demo_model_path(), kv_cache_gib=0.25, max_num_seqs=5) as llm:
        yield llm


def by_key(outputs: list[RequestOutput]) -> dict[str | None, list[list[int]]]:
    return {o.key: [completion.token_ids for completion in o.outputs] for o in outputs}


def test_samples_of_a_row_depend_on_its_key_only(demo: LLM) -> None:
    rows = [Row(f"Tell a story about {what}.", key=f"row-{what}") for what in "abcdefgh"]
    expected = by_key(generate(demo, rows, SAMPLED))
    assert len(expected) == 8
    assert len({tuple(tokens) for pair in expected.values() for tokens in pair}) == 16
    shuffled = random.Random(3).sample(rows, len(rows))
    in_batch = by_key(generate(demo, ["Once", *shuffled, "Once"], SAMPLED))
    assert {key: tokens for key, tokens in in_batch.items() if key} == expected
    found = by_key(list(demo.stream(iter(shuffled), SAMPLED)))
    assert found == expected
    for row in rows[:3]:
        assert by_key(generate(demo, [row], SAMPLED)) == {row.key: expected[row.key]}
    with LLM(demo_model_path(), kv_cache_gib=0.25) as resumed:
        rest = by_key(generate(resumed, rows[5:], SAMPLED))
    assert rest == {row.key: expected[row.key] for row in rows[5:]}


def test_seeds_derive_from_the_key_and_the_engines_seed(demo: LLM) -> None:
    """Equal keys give equal random numbers; other keys and other job seeds give different ones. A
    row's own seed overrides both, and a row without a key uses its arrival index."""
    rows = [Row("Once", key="a"), Row("Once", key="a"), Row("Once", key="b"), Row("Once")]
    one, same, other, unnamed = (o.outputs[0].token_ids for o in generate(demo, rows, SAMPLED))
    assert one == same
    assert len({tuple(tokens) for tokens in (one, other, unnamed)}) == 3
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    first, second = generate(demo, [Row("Once", key="a"), Row("Once", key="b")], seeded)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    with LLM(demo_model_path(), kv_cache_gib=0.25, seed=1) as later:
        (differs,) = generate(later, [Row("Once", key="a")], SAMPLED)
    assert differs.outputs[0].token_ids != one


def test_without_keys_seeds_derive_from_the_order_of_arrival(llm: LLM) -> None:
    """The seed is xxh3_64 of "seed/arrival", shifted right by 1. These calls keep their tokens."""
    import xxhash

    requests = []
    add = llm.engine.scheduler.add
    llm.engine.scheduler.add = lambda request: (  # type: ignore[method-assign]
        requests.append(request.seed),
        add(request),
    )[1]
    generate(llm, ["one", Row("dog", key="1"), "one"], LONG)
    arrivals = [xxhash.xxh3_64_intdigest(f"0/{n}".encode()) >> 1 for n in range(3)]
    assert [requests[0], requests[2]] == [arrivals[0], arrivals[2]]
    assert requests[1] not in arrivals
