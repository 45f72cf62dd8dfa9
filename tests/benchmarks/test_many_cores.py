"""The model of many cores: it counts what a step costs, and more cores cost what they should."""

from __future__ import annotations

import pytest

from benchmarks.many_cores import (
    MACHINES,
    Machine,
    head_part,
    host_seconds,
    layer_parts,
    step_seconds,
    table,
)
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.shapes import SHAPES
from nanoengine.observe.metrics import StepRecord

SMALL = SHAPES["small"]
ONE = Machine(cores=1, core_bytes=1e10, socket_bytes=1e10, core_flops=1e11)


def totals(rows: int, context: int) -> tuple[float, float]:
    """FLOPs and bytes of the parts that multiply and attend."""
    parts = SMALL["num_hidden_layers"] * layer_parts(SMALL, rows, context, 4, 4, 1)
    big = [part for part in parts if part.name not in ("norm", "rotate", "gate")]
    flops = sum(part.count * part.item_flops for part in big)
    return flops, sum(part.count * part.item_bytes for part in big)


@pytest.mark.parametrize("rows", [1, 32])
def test_parts_are_the_flops_and_bytes_of_the_model_of_costs(rows):
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


def test_one_core_forks_nothing_and_takes_the_sum_of_its_parts():
    found = step_seconds(SMALL, ONE, 1, 512)
    assert found["forks"] == 0
    head = head_part(SMALL, 1, 4, 1)
    read = totals(1, 512)[1] + head.item_bytes * head.count
    assert sum(found.values()) == pytest.approx(read / 1e10, rel=0.02)


def test_more_workers_fork_more_and_never_read_more():
    machine = MACHINES["64 cores, 8 channels"]
    few, many = (
        step_seconds(SMALL, machine, 1, 512, host_s=host_seconds(1), workers=workers)
        for workers in (16, 64)
    )
    assert many["forks"] > few["forks"] > 0
    rest = sum(few.values()) - few["forks"]
    assert sum(many.values()) - many["forks"] <= rest * (1 + 1e-9)


def test_few_rows_of_an_item_are_not_cut_and_many_are():
    """20 tiles on 64 cores take as long as 32 do; of 512 rows, cut into 13 and 8 parts, not."""
    machine = MACHINES["64 cores, 8 channels"]
    narrow, wide = (
        [step_seconds({**SMALL, "hidden_size": size}, machine, rows, 1)["o"] for rows in (63, 512)]
        for size in (640, 1024)
    )
    assert narrow[0] == pytest.approx(wide[0])
    assert narrow[1] / wide[1] == pytest.approx(5 / 13 / (4 / 8))


def test_the_table_has_a_line_for_each_case():
    assert len(list(table())) == 3 * len(MACHINES) * 3
