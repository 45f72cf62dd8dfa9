"""The many-core model counts the cost of a step, and more cores have the expected cost."""

from __future__ import annotations

import pytest

from benchmarks.many_cores import (
    Machine,
    head_part,
    layer_parts,
    step_seconds,
)
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.shapes import SHAPES
from nanoengine.observe.metrics import StepRecord

SMALL = SHAPES["small"]
ONE = Machine(cores=1, core_bytes=1e10, socket_bytes=1e10, core_flops=1e11)


def totals(rows: int, context: int) -> tuple[float, float]:
    """FLOPs and bytes of matrix products and attention."""
    parts = SMALL["num_hidden_layers"] * layer_parts(SMALL, rows, context, 4, 4, 1)
    big = [part for part in parts if part.name not in ("norm", "rotate", "gate")]
    flops = sum(part.count * part.item_flops for part in big)
    return flops, sum(part.count * part.item_bytes for part in big)


@pytest.mark.parametrize("rows", [1, 32])
def test_parts_have_the_flops_and_bytes_of_the_cost_model(rows):
    cost = ModelCost.from_config(SMALL, element_bytes=4)
    record = StepRecord.__new__(StepRecord)
    fields = {"starts": [511] * rows, "num_scheduled": [1] * rows, "num_logits": [1] * rows}
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    flops, read = cost.step(record)
    head = head_part(SMALL, rows, 4, 1)
    found = totals(rows, 512)
    assert found[0] + head.count * head.item_flops == pytest.approx(flops, rel=0.01)
    assert found[1] + 4 * cost.head_params == pytest.approx(read, rel=0.01)


def test_one_core_starts_no_threads_and_takes_the_sum_of_its_parts():
    found = step_seconds(SMALL, ONE, 1, 512)
    assert found["forks"] == 0
    head = head_part(SMALL, 1, 4, 1)
    read = totals(1, 512)[1] + head.item_bytes * head.count
    assert sum(found.values()) == pytest.approx(read / 1e10, rel=0.02)
