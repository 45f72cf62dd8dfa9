"""The kernels around a decode's forward, interpreted: what their twins in torch compute."""

import pytest
import torch

from nanoengine.runner import triton_rows
from nanoengine.runner.device_rows import DeviceRows
from nanoengine.runner.sampling.draw import mix
from nanoengine.runner.triton_rows import TritonRows
from tests.support.attention_cases import DEVICE
from tests.support.logits import uniforms_of

LINES, BLOCK_SIZE = 8, 4
SEEDS = [0, 7, 2**63 - 1, 2**62 + 12345, 1, 2, 3, 0]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles so small that a table, and a batch, have several."""
    monkeypatch.setattr(triton_rows, "WIDTH", 4)
    monkeypatch.setattr(triton_rows, "ADVANCED", 2)


def held(kind, num_groups):
    """Seven rows at random places, and padding."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = 9
    pool = torch.randint(0, 500, (LINES,), generator=generator)
    pool[-1] = 0
    found = kind(
        pool.to(DEVICE), num_groups=num_groups, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    lengths = torch.tensor([0, 3, 4, 35, 17, 16, 2, 0])
    shape = (num_groups, LINES - 1, num_blocks)
    found.lengths.copy_(lengths)
    found.tables[:, :-1] = torch.randint(1, 2**30, shape, generator=generator).int().to(DEVICE)
    found.columns[:, :-1] = torch.rand((4, LINES - 1), generator=generator).double().to(DEVICE)
    found.seeds.copy_(mix(torch.tensor(SEEDS)))
    return found


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("rows", [[3], [6, 0, 2, 5, 1, 3, 4], [4, 1, 7, 7]])
def test_gathers_the_inputs_of_its_twin(rows, num_groups):
    ours, twin = held(TritonRows, num_groups), held(DeviceRows, num_groups)
    rows = torch.tensor(rows, device=DEVICE)
    expected, _ = twin.gather(rows)
    for name, mine in ours.gather(rows)[0].items():
        assert mine.dtype == expected[name].dtype
        assert torch.equal(mine, expected.pop(name))
    assert not expected
    assert torch.equal(ours.draw_params, twin.draw_params)
    positions = twin.lengths[rows].cpu().numpy() + 1
    numbers = uniforms_of(torch.tensor(SEEDS)[rows.cpu()].numpy(), positions)
    assert ours.draw_params[4, : len(rows)].tolist() == numbers.tolist()


@pytest.mark.parametrize("rows", [[3], [6, 0, 2, 5, 1, 3, 4], [4, 1, 7, 7, 7]])
def test_advances_as_its_twin_and_leaves_padding(rows):
    ours, twin = held(TritonRows, 1), held(DeviceRows, 1)
    rows, token_ids = torch.tensor(rows, device=DEVICE), torch.arange(100, 100 + len(rows))
    for either in (ours, twin):
        either.advance(rows, token_ids.to(DEVICE))
    assert torch.equal(ours.pool, twin.pool)
    assert torch.equal(ours.lengths, twin.lengths)
    assert ours.pool[-1] == ours.lengths[-1] == 0
    assert ours.pool[rows[0]] == 100
