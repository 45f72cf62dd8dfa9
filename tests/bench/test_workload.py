"""The token counts of the benchmark's workloads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nanoengine.bench.workload import (
    Scale,
    WorkItem,
    WorkOptions,
    file_workload,
    fit,
    random_workload,
    shift_ids,
)
from nanoengine.errors import ConfigError


def items_of(**options: object) -> list[WorkItem]:
    return list(WorkOptions(**options).items(0, lambda text: [ord(c) for c in text]))


def test_the_standard_workload_has_the_published_token_counts() -> None:
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    items = items_of()
    assert [list(item.prompt_token_ids) for item in items] == prompts
    assert [item.max_tokens for item in items] == lengths
    assert sum(map(len, prompts)) == 142_827
    assert sum(lengths) == 133_966


def test_ids_are_taken_modulo_the_vocabulary_with_a_note() -> None:
    items = [WorkItem((3, 10, 25), 2)]
    assert fit(items, 10, 100, cap=False) == (
        [WorkItem((3, 0, 5), 2)],
        ["prompt ids are taken modulo the vocabulary of 10"],
    )
    assert fit(items, 26, 100, cap=False) == (items, [])


def test_requests_beyond_the_context_raise_or_are_cut_with_a_note() -> None:
    items = [WorkItem(tuple(range(8)), n) for n in (2, 5, 50)]
    with pytest.raises(ConfigError, match=r"8 \+ 5 tokens exceeds max_model_len=10"):
        fit(items, 100, 10, cap=False)
    fitted, notes = fit(items, 100, 10, cap=True)
    assert [(len(ids), length) for ids, length in fitted] == [(8, 2), (5, 5), (1, 9)]
    assert notes == ["2 of 3 requests are cut to a context of 10"]
    with pytest.raises(ConfigError, match="needs a prompt and at least one output token"):
        fit([WorkItem((), 3)], 100, 10, cap=True)


def test_rounds_share_no_prefix() -> None:
    fitted, _ = fit(list(random_workload(Scale(4, (5, 9), (1, 1)), 1)), 100, 50, cap=False)
    for before, after in zip(fitted, shift_ids(fitted, 1, 100), strict=True):
        assert len(before.prompt_token_ids) == len(after.prompt_token_ids)
        assert before.prompt_token_ids[0] != after.prompt_token_ids[0]


def test_the_shared_prefix_workload_has_one_prefix() -> None:
    sizes = {"input_len": (3, 3), "output_len": (4, 4), "num_requests": 5}
    prompts = [ids for ids, _ in items_of(dataset="shared-prefix", prefix_len=20, **sizes)]
    assert {len(prompt) for prompt in prompts} == {23}
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:] for prompt in prompts}) == 5


def test_a_csv_workload_has_the_lengths_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\ny,396,109\nz,1,1\n")
    items = items_of(dataset=str(path), num_requests=2)
    assert [(len(ids), length) for ids, length in items] == [(374, 44), (396, 109)]
    assert max(max(ids) for ids, _ in items) <= 10_000
    path.write_text("ContextTokens,GeneratedTokens\n5,0\n")
    with pytest.raises(ConfigError, match=r"row 1 must hold integers .* a length below 1"):
        items_of(dataset=str(path))
    path.write_text("ContextTokens\n5\n")
    with pytest.raises(ConfigError, match="row 1 must hold integers"):
        items_of(dataset=str(path))


def test_a_jsonl_workload_accepts_ids_and_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6], "max_tokens": 3}\n\n{"prompt": "abc"}\n')
    scale = Scale(9, (1, 1), (7, 7))
    items = list(file_workload(path, scale, 0, lambda text: [ord(c) for c in text]))
    assert items == [WorkItem((5, 6), 3), WorkItem((97, 98, 99), 7)]
    for bad in ('{"text": "abc"}', "not json", "[1]"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl: row 1 must be a JSON object"):
            items_of(dataset=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "nowhere.csv"}, "workload must be random, shared-prefix, or an existing"),
        ({"input_len": (5, 4)}, "input_len must be a range of positive lengths, got 5 4"),
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"output_len": (0, 4)}, "output_len must be a range of positive lengths, got 0 4"),
    ],
)
def test_invalid_workload_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        items_of(**options)


def test_smoke_is_small_and_explicit_options_take_precedence() -> None:
    smoke = items_of(smoke=True)
    assert len(smoke) == 32
    assert max(len(ids) + length for ids, length in smoke) <= 256
    assert len(items_of(smoke=True, num_requests=3)) == 3
