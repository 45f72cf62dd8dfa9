"""The roofline against manual calculations and an independent replay of the workload."""

import pytest

from benchmarks.suite.cost import ModelCost
from benchmarks.suite.roofline import (
    H200_MEASURABLE,
    Card,
    Losses,
    decode_step,
    roofline,
)
from benchmarks.suite.shapes import SHAPES
from nanoengine.bench.workload import random_workload

LENGTHS = [(len(item.prompt_token_ids), item.max_tokens) for item in random_workload()]
QWEN = ModelCost.from_config(SHAPES["qwen3-0.6b"], 2)
LLAMA_8B = ModelCost.from_config(
    {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    2,
)


def test_the_standard_workload_on_one_h200():
    ideal = roofline(QWEN, LENGTHS, H200_MEASURABLE)
    assert ideal.output_tokens == 133_966
    assert ideal.seconds == pytest.approx(3.72, abs=0.005)
    assert ideal.output_tokens_per_s == pytest.approx(36_000, rel=0.002)
    assert ideal.prefill_s == pytest.approx(137e12 / 790e12, rel=0.005)
    assert ideal.weights_s == pytest.approx(0.30, abs=0.006)
    assert ideal.kv_s == pytest.approx(13.85e12 / 4.3e12, rel=0.001)
    assert ideal.logits_s == pytest.approx(0.02, abs=0.002)
    assert ideal.kv_s / ideal.seconds == pytest.approx(0.87, abs=0.005)


@pytest.mark.parametrize(
    ("step", "ms"), [(1, 4.24), (200, 4.82), (500, 3.86), (800, 2.50), (1000, 0.457)]
)
def test_ideal_steps(step, ms):
    ideal = roofline(QWEN, LENGTHS, H200_MEASURABLE)
    assert len(ideal.step_s) == 1023
    assert 1e3 * ideal.step_s[step - 1] == pytest.approx(ms, rel=0.005)


def test_the_roofline_of_other_gpus_models_and_caches():
    fp8 = roofline(QWEN, LENGTHS, H200_MEASURABLE, kv_element_bytes=1)
    assert fp8.seconds == pytest.approx(2.11, abs=0.005)
    assert fp8.output_tokens_per_s == pytest.approx(63_500, rel=0.002)
    datasheet = Card(bytes_per_s=4.8e12, flops_per_s=989e12)  # NVIDIA's figures for the H200 SXM
    sheet = roofline(QWEN, LENGTHS, datasheet)
    assert sheet.output_tokens_per_s == pytest.approx(40_500, rel=0.002)
    llama = roofline(LLAMA_8B, LENGTHS, H200_MEASURABLE)
    assert llama.output_tokens_per_s == pytest.approx(13_300, rel=0.005)


@pytest.mark.parametrize(
    ("fixed_ms", "tokens_per_s"),
    [(0.1, 29_100), (0.3, 27_900), (0.5, 26_700), (1, 24_300), (2, 20_500), (4, 15_600)],
)
def test_a_fixed_cost_of_every_step(fixed_ms, tokens_per_s):
    losses = Losses(memory_frac=0.85, gemm_frac=0.7, step_s=fixed_ms / 1e3)
    real = roofline(QWEN, LENGTHS, H200_MEASURABLE, losses=losses)
    assert real.output_tokens_per_s == pytest.approx(tokens_per_s, rel=0.003)
    assert real.fixed_s == pytest.approx(1023 * fixed_ms / 1e3)


def test_one_step_by_hand():
    config = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
    }
    cost = ModelCost.from_config(config, 2)
    params = 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16 + 8 * 10
    card = Card(bytes_per_s=1.0, flops_per_s=1.0)
    few = decode_step(cost, batch=1, context=7, card=card)
    assert few == (2.0 * params, 2.0 * 1 * 4 * 2 * 7, 2.0 * 10 * 2)
    many = decode_step(cost, batch=3, context=7, card=card, kv_element_bytes=1)
    assert many == (2.0 * params * 3, 2.0 * 1 * 4 * 1 * 7, 3 * 2.0 * 10 * 2)


def test_outputs_of_one_token_need_no_decode_step():
    alone = roofline(QWEN, [(100, 1)], H200_MEASURABLE)
    assert alone.step_s == ()
    assert alone.seconds == alone.prefill_s > 0
