"""Models with latent attention on a GPU that is not there: tokens and log-probabilities are those
of plain torch on the CPU, whatever the engine does; decodes are graphs; launches are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nanoengine import SamplingParams
from nanoengine.attention import triton_latent
from tests.layers import test_small_floats
from tests.models.test_latent import OTHERS, STORED_SIZES
from tests.support.attention_cases import DEVICE
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.gpu_tokens import ON_GPU, PROMPTS, SIZES, check_tokens
from tests.support.quantized_checkpoints import PROJECTIONS

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one"),
    # Why: the interpreter takes half a minute.
    pytest.mark.guards(
        "nanoengine/*/triton*.py",
        "nanoengine/models/latent.py",
        "nanoengine/runner/decode_step.py",
        "nanoengine/runner/graphs.py",
        "tests/support/emulated_gpu.py",
        "tests/support/gpu_tokens.py",
    ),
]
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES = [
    ("deepseek_v2", GROUPS, {"num_kv_blocks": 60}, greedy(4)),
    ("deepseek_v3", {}, {"num_kv_blocks": 60, "max_num_batched_tokens": 21}, greedy(4)),
    ("glm4_moe_lite", {}, {"num_kv_blocks": 60}, greedy(3)),
    ("minicpm3", {}, {"num_kv_blocks": 60}, greedy(4)),
    ("minicpm3", {}, {"num_kv_blocks": 60, "deterministic": True}, greedy(3)),
    ("youtu", {}, {"num_kv_blocks": 7}, greedy(12)),
]


@pytest.fixture
def short_splits(monkeypatch):
    """Contexts of these lengths are split."""
    whole = triton_latent.latent_config
    monkeypatch.setattr(
        triton_latent, "latent_config", lambda *of: replace(whole(*of), split_tokens=16)
    )


@pytest.mark.parametrize(("family", "fields", "options", "params"), CASES)
def test_tokens_are_those_of_the_cpu(short_splits, family, fields, options, params):
    gpu, stats = check_tokens(family, params, fields=fields, **options)
    assert stats.cache_hit_tokens > 16
    assert (stats.preemptions > 0) is (options["num_kv_blocks"] == 7)
    assert ("bmm" in gpu.kernels) is not options.get("deterministic", False)


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_log_probabilities_are_those_of_the_cpu(family):
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def found(**options):
        engine = make_engine(
            checkpoint(family), **SIZES, num_kv_blocks=20, max_num_batched_tokens=16, **options
        )
        results = run(engine, PROMPTS[:3], asked)
        engine.close()
        return [
            [entry.logprob for entries in result.prompt_logprobs for entry in entries]
            for result in results
        ]

    expected = found(attention_backend="naive")
    with EmulatedGPU():
        ours = found(**ON_GPU)
    for mine, its in zip(ours, expected, strict=True):
        assert mine == pytest.approx(its, abs=2e-4)


def test_launches_of_a_layer():
    """A dense family, a prompt and decodes outside of graphs, whose contexts are not split: 14 a
    layer, its MLP included. The fourth step has nothing to run."""
    launches = {}
    with EmulatedGPU() as gpu:
        for layers in (1, 3):
            engine = make_engine(
                checkpoint("youtu", num_hidden_layers=layers), **SIZES, **ON_GPU,
                num_kv_blocks=40, enforce_eager=True,
            )  # fmt: skip
            prompt = random_prompts(1, [20])[0]
            engine.add_request("0", prompt, greedy(3))
            launches[layers] = []
            while engine.has_unfinished():
                gpu.kernels.clear()
                engine.step()
                launches[layers].append(dict(gpu.kernels))
            engine.close()
    expected = {
        "mm": 6, "rms_norm_kernel": 3, "turn_latents_kernel": 1, "bmm": 2, "latent_kernel": 1,
        "gate_kernel": 1,
    }  # fmt: skip
    assert len(launches[1]) == 4
    for one, three in list(zip(launches[1], launches[3], strict=True))[:3]:
        found = Counter(three) - Counter(one)
        assert found == {name: 2 * count for name, count in expected.items()}


def test_two_ranks_give_the_tokens_of_one():
    """In the interpreter alone: the emulated card is one. By processes: the interpreter is not made
    for threads."""
    directory, prompts = checkpoint("deepseek_v3"), PROMPTS[2:]
    one = make_engine(directory, **SIZES, num_kv_blocks=20)
    expected = tokens(run(one, prompts, greedy(3)))
    two = make_engine(
        directory, **SIZES, num_kv_blocks=20, attention_backend="triton", tensor_parallel_size=2
    )
    assert tokens(run(two, prompts, greedy(3))) == expected
    two.close()


def test_a_model_stored_in_fp8_gives_the_tokens_of_its_float_weights(tmp_path, monkeypatch):
    """In blocks of 128 x 128, as DeepSeek-V3 is."""
    monkeypatch.setattr(test_small_floats, "MATRICES", PROJECTIONS + OTHERS)
    floats = test_small_floats.write(tmp_path, "block", "deepseek_v3", **STORED_SIZES)
    plain = make_engine(str(floats), **SIZES, num_kv_blocks=9, attention_backend="naive")
    expected = tokens(run(plain, PROMPTS[2:3], greedy(3)))
    with EmulatedGPU() as gpu:
        engine = make_engine(str(tmp_path / "stored"), **SIZES, **ON_GPU, num_kv_blocks=9)
        assert tokens(run(engine, PROMPTS[2:3], greedy(3))) == expected
        engine.close()
        assert gpu.num_allocated == 0
