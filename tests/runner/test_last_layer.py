"""In the last layer only tokens with logits continue after attention; the results are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanoengine.core.plan import Fork, StepPlan
from nanoengine.runner.input_batch import InputBatch
from nanoengine.settings.params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import build, cpu_kernels, prefill_batch

FAMILIES = ["qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "gemma3"]


def count_mlp_tokens(engine, monkeypatch) -> list[list[int]]:
    """The number of tokens that reach each layer's MLP, one list per future step."""
    steps: list[list[int]] = []
    layers = engine.executor.model.model.layers

    def count(index, forward):
        def counted_forward(x):
            if index == 0:
                steps.append([])
            steps[-1].append(len(x))
            return forward(x)

        return counted_forward

    for index, layer in enumerate(layers):
        monkeypatch.setattr(layer.mlp, "forward", count(index, layer.mlp.forward))
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_computes_one_token_per_prompt_in_the_last_mlp(family, monkeypatch):
    engine = make_engine(checkpoint(family))
    steps = count_mlp_tokens(engine, monkeypatch)
    run(engine, random_prompts(3, [9, 1, 5]), greedy(2))
    *all_but_last, last = steps[0]
    assert (set(all_but_last), last) == ({15}, 3)
    assert set(steps[1]) == {3}


def test_a_chunk_before_the_end_of_its_prompt_computes_none(monkeypatch):
    (prompt,) = random_prompts(1, [40])
    expected = tokens(run(make_engine(checkpoint("qwen3")), [prompt], greedy(4)))
    engine = make_engine(checkpoint("qwen3"), max_num_batched_tokens=16, max_num_seqs=4)
    steps = count_mlp_tokens(engine, monkeypatch)
    assert tokens(run(engine, [prompt], greedy(4))) == expected
    assert [(step[0], step[-1]) for step in steps] == [(16, 0), (16, 0), (8, 1), *[(1, 1)] * 3]


def test_scored_positions_reach_the_last_mlp(monkeypatch):
    engine = make_engine(checkpoint("llama"), max_num_batched_tokens=32, max_num_seqs=4)
    steps = count_mlp_tokens(engine, monkeypatch)
    scored = replace(greedy(1), prompt_logprobs=0)
    run(engine, random_prompts(3, [5, 40, 9]), [greedy(1), scored, greedy(1)])
    assert [(step[0], step[-1]) for step in steps] == [(32, 1 + 27), (13 + 9, 13 + 1)]


def test_each_fork_computes_the_last_token_of_its_parent(monkeypatch):
    engine = make_engine(checkpoint("llama"))
    steps = count_mlp_tokens(engine, monkeypatch)
    params = SamplingParams(n=3, seed=1, max_tokens=1, ignore_eos=True)
    run(engine, random_prompts(1, [2]), params)
    assert [(step[0], step[-1]) for step in steps] == [(2, 3)]


@pytest.mark.parametrize("rows", [[14], [3, 3, 0, 14], [], list(range(15))])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_bits_with_any_other_tokens(family, rows, tmp_path):
    make_checkpoint(tmp_path, family)
    model = build(tmp_path, kernels=cpu_kernels())
    batch = prefill_batch(random_prompts(3, [9, 1, 5]))
    with torch.inference_mode():
        everything = model(replace(batch, logits_indices=None))
        found = model(replace(batch, logits_indices=torch.tensor(rows, dtype=torch.int64)))
    assert everything.shape == (15, 64)
    assert torch.equal(found, everything[rows])


def plan_of(*entries: tuple[int, int, int, int], **fields) -> StepPlan:
    """A plan with these (row, start, tokens, rows of logits) entries."""
    rows, starts, counts, num_logits = map(list, zip(*entries, strict=True))
    return StepPlan(
        step=1, rows=rows, starts=starts, num_scheduled_tokens=counts, num_logits=num_logits,
        **fields,
    )  # fmt: skip


def logits_indices(plan: StepPlan, scored: list[int]) -> list[int] | None:
    input_batch = InputBatch(
        max_num_seqs=8, max_model_len=64, block_size=8, num_groups=1, device=torch.device("cpu")
    )
    batch, _ = input_batch.make_batch(plan, (np.zeros(len(scored), np.int64), np.array(scored)))
    return None if batch.logits_indices is None else batch.logits_indices.tolist()


def test_logits_are_of_sampled_positions_then_of_scored_ones():
    # In [T] decodes come first: row 2 at 0, row 0 at 1 to 4, row 5 at 5 to 7, row 1 at 8 to 9.
    plan = plan_of((0, 0, 4, 0), (5, 9, 3, 3), (2, 7, 1, 1), (1, 3, 2, 1))
    assert logits_indices(plan, [4, 0, 0, 1]) == [5, 6, 7, 0, 9, 1, 2, 3, 4, 8]


def test_logits_indices_are_none_for_all_tokens_in_order():
    assert logits_indices(plan_of((3, 5, 1, 1), (0, 8, 1, 1)), [0, 0]) is None
    assert logits_indices(plan_of((3, 5, 2, 2), (0, 8, 1, 1)), [0, 0]) == [1, 2, 0]
    forks = [Fork(row=1, parent_row=0, seq_id=7, seed=1)]
    assert logits_indices(plan_of((0, 0, 2, 1), (1, 2, 0, 1), forks=forks), [0, 0]) == [1, 1]
