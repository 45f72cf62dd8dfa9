"""The minimum cost of a step and the limits of the hardware, by arithmetic and measurement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.suite import cpu_peak, peak
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.peak import measure_peaks
from nanoengine.core.plan import StepTimes
from nanoengine.kernels.isa import CURRENT
from nanoengine.observe.metrics import StepRecord

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 32,
}


def record(*rows: tuple[int, int, int]) -> StepRecord:
    """A step with one (start, tokens, logits) entry per row."""
    return StepRecord(
        time_s=0.0,
        rows=range(len(rows)),
        starts=[start for start, _, _ in rows],
        num_scheduled=[count for _, count, _ in rows],
        num_logits=[logits for _, _, logits in rows],
        num_sampled=[],
        admitted=[],
        times=StepTimes(),
    )


def brute_force_cost(config: dict, windows: list, rows: list[tuple[int, int, int]]) -> tuple:
    """FLOPs and elements by loops over layers, rows and tokens."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, hidden = config["head_dim"], config["hidden_size"]
    matrices = [
        (hidden, (heads + 2 * kv_heads) * dim),
        (heads * dim, hidden),
        *[(hidden, config["intermediate_size"])] * 3,
    ]
    of_qkv, *tail = (a * b for a, b in matrices)
    flops = elements = 0
    for layer, window in enumerate(windows):
        is_last = layer == len(windows) - 1
        elements += of_qkv
        elements += sum(tail) if any((n if is_last else count) for _, count, n in rows) else 0
        for start, count, num_logits in rows:
            flops += 2 * count * of_qkv + 2 * (num_logits if is_last else count) * sum(tail)
            read = set()
            for position in range(start, start + count):
                context = [p for p in range(position + 1) if not window or p > position - window]
                read |= set(context)
                flops += 2 * 2 * len(context) * heads * dim
            elements += 2 * kv_heads * dim * (len(read) + count)
    head = config["vocab_size"] * hidden
    num_logits = sum(n for _, _, n in rows)
    return flops + 2 * num_logits * head, elements + (head if num_logits else 0)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("rows", [[(0, 5, 0), (9, 1, 1), (3, 4, 1), (6, 0, 1)], [(4, 8, 0)]])
def test_cost_equals_a_count_by_hand(rows: list, window: int | None) -> None:
    layers = ["sliding_attention", "full_attention"]
    config = CONFIG | {"sliding_window": window, "layer_types": layers}
    flops, elements = brute_force_cost(config, [window, None], rows)
    assert ModelCost.from_config(config, 2).step(record(*rows)) == (flops, 2 * elements)


def test_quantized_weights_cost_their_own_bytes() -> None:
    step = record((3, 1, 1))
    plain = ModelCost.from_config(CONFIG, 4)
    eighth = ModelCost.from_config(CONFIG, 4, 0.5)
    weights = plain.dense_params + plain.head_params
    assert eighth.step(step)[0] == plain.step(step)[0]
    assert plain.step(step)[1] - eighth.step(step)[1] == 3.5 * weights


def test_cost_of_experts() -> None:
    moe = CONFIG | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    cost = ModelCost.from_config(moe, 1)
    dense = ModelCost.from_config(CONFIG | {"intermediate_size": 10}, 1)
    router = 2 * 8 * 8
    one_token = record((0, 1, 1))
    # A single token uses exactly 2 experts of size 5: a dense MLP of size 10, and the router.
    assert cost.step(one_token)[0] == dense.step(one_token)[0] + 2 * router
    assert cost.step(one_token)[1] == pytest.approx(dense.step(one_token)[1] + router)
    many = record((0, 1000, 1000))
    all_experts = ModelCost.from_config(CONFIG | {"intermediate_size": 40}, 1)
    assert cost.step(many)[1] == pytest.approx(all_experts.step(many)[1] + router)
    # A chunk without logits skips the router and the experts of the last layer.
    chunk = record((0, 1000, 0))
    assert cost.step(chunk)[1] == pytest.approx(all_experts.step(chunk)[1] + router / 2)


def test_peaks_are_measured() -> None:
    peaks = measure_peaks(torch.device("cpu"), torch.float32, seconds=0.01, buffer_bytes=2**22)
    assert peaks.read_gbs > 0
    assert peaks.gemm_gflops > 0
    assert (peaks.dtype, peaks.by) == ("float32", CURRENT.name)


def test_the_gpu_peak_is_measured_on_random_matrices(monkeypatch) -> None:
    """A constant matrix draws less power and made the measured limit a tenth too high."""
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a, b)))
    assert peak._gemm_rate(torch.device("cpu"), torch.bfloat16, 32, 0.0) > 0
    for matrix in seen[0]:
        assert len(matrix.unique()) > 100
    assert not torch.equal(*seen[0])


def test_a_compute_kernel_does_all_counted_products() -> None:
    def sums(kernel: Any, x: np.ndarray, y: np.ndarray, start: np.ndarray, iterations: int) -> Any:
        """The sums after `iterations` on one worker, all of them initialized to `start`."""
        data = np.zeros((1, cpu_peak.ROOM), start.dtype)
        width = len(x.view(start.dtype))
        data[0, :width], data[0, width : 2 * width] = x.view(start.dtype), y.view(start.dtype)
        data[0, 2 * width :] = start[0]
        kernel(data, iterations)
        return data[0, 2 * width : (2 + cpu_peak.CHAINS) * width]

    for real in (np.float32, np.float64):
        width = CURRENT.vector_bits // 8 // real().itemsize
        x, y = np.full(width, 3, real), np.arange(width).astype(real)
        got = sums(cpu_peak.multiply_floats, x, y, np.ones(1, real), 5)
        assert np.array_equal(got, np.tile(1 + 5 * x * y, cpu_peak.CHAINS))
        assert cpu_peak.operations(np.dtype(real).name) == 2 * got.size
    if "bfloat16" in cpu_peak.KERNELS:
        width = CURRENT.vector_bits // 16
        numbers = torch.arange(width, dtype=torch.bfloat16)
        x = y = numbers.view(torch.int16).numpy()
        got = sums(cpu_peak.multiply_bfloat16, x, y, np.ones(1, np.float32), 5)
        pairs = 1 + 5 * (np.arange(width, dtype=np.float32) ** 2).reshape(-1, 2).sum(1)
        assert np.array_equal(got, np.tile(pairs, cpu_peak.CHAINS))
        assert cpu_peak.operations("bfloat16") == 4 * got.size
    if "int8" in cpu_peak.KERNELS:
        width = CURRENT.byte_bits // 8
        x, y = np.full(width, 3, np.uint8), np.arange(width, dtype=np.int8)
        start = np.ones(1, np.int32).view(np.float32)
        got = sums(cpu_peak.multiply_bytes, x, y, start, 1).view(np.int32)
        # Without vpdpbusd the second factor is the sum itself: 1, 0, 0, 0 as bytes.
        fours = y.reshape(-1, 4).sum(1) if CURRENT.byte_dots == "vpdpbusd" else np.ones(width // 4)
        assert np.array_equal(got, np.tile(1 + 3 * fours, cpu_peak.CHAINS))
        assert cpu_peak.operations("int8") == 8 * got.size


def test_the_read_kernel_reads_all_bytes() -> None:
    data, found = cpu_peak.buffer(3 * 4 * cpu_peak.PAGE, 2), np.empty(2, np.int32)
    assert len(data) == 3 * cpu_peak.PAGE
    assert (data == 1).all()
    data[:] = 0
    for at in (0, 5, cpu_peak.PAGE - 1, cpu_peak.PAGE, 2 * cpu_peak.PAGE + 4321, len(data) - 1):
        data[at] = 1 << at % 31
        cpu_peak.read(data, found, 2)
        assert found.tolist() == [(1 << at % 31) * (worker == int(at >= cpu_peak.PAGE))
                                  for worker in range(2)]  # fmt: skip
        data[at] = 0
