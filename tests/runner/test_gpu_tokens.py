"""Models of every kind on an emulated GPU: tokens and log-probabilities match plain torch on the
CPU, decodes are CUDA graphs, and launches are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nanoengine import SamplingParams
from nanoengine.attention import triton_mla
from nanoengine.core.plan import StepPlan
from nanoengine.runner.decode_step import DecodeStep
from tests.models.test_mla import STORED_SIZES
from tests.support.attention_cases import DEVICE
from tests.support.checkpoints import FAMILIES
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.quantized_checkpoints import write_case

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one"),
    pytest.mark.guards(  # Why: the interpreter takes a minute.
        "nanoengine/*/triton*.py", "nanoengine/models/*.py",
        "nanoengine/runner/recurrent_states.py", "nanoengine/runner/decode_step.py",
        "nanoengine/runner/graphs.py",
        "tests/support/emulated_gpu.py",
    ),
]  # fmt: skip
SIZES = {
    "max_num_seqs": 3, "max_model_len": 64, "block_size": 16, "dtype": "float32"
}  # fmt: skip
ON_GPU = {"device": "cuda", "attention_backend": "triton"}
WAIT = {"event.synchronize, runner/transfers.py wait"}
"""The synchronization for sampled tokens."""
[_SHARED] = random_prompts(1, [36], seed=3)
PROMPTS = [_SHARED + tail for tail in random_prompts(2, [7, 1], seed=4)]
PROMPTS += random_prompts(2, [13, 1], seed=5)
"""Two prompts with a common prefix, and two short ones."""
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CHUNKS = {"max_num_batched_tokens": 21}
FORKED = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
FEW_BLOCKS = {"num_kv_blocks": 7}
"""A pool that is too small for the prompts and 12 tokens each."""
CASES = [
    ("qwen3", greedy(12), FEW_BLOCKS),
    # MLA.
    ("deepseek_v2", greedy(4), {"fields": GROUPS}),
    ("deepseek_v3", greedy(12), CHUNKS | FEW_BLOCKS),
    ("glm4_moe_lite", greedy(3), {}),
    # Recurrent states.
    ("lfm2", greedy(4), CHUNKS),
    ("lfm2", greedy(12), FEW_BLOCKS),
    ("lfm2", FORKED, {}),
    *((family, greedy(4), CHUNKS) for family in ("qwen3_5", "falcon_h1", "nemotron_h")),
    ("bamba", greedy(12), FEW_BLOCKS),
    # Layers with two head sizes, with windows, and with keys of an earlier layer.
    ("gemma4", SCORED, {"runs": 1}),
    ("gemma4", greedy(3), {"runs": 1, "deterministic": True}),
    # Experts. A step of qwen2_moe may be a single chunk, which needs no logits.
    ("qwen3_moe", greedy(4), {}),
    ("qwen2_moe", greedy(4), {"max_num_batched_tokens": 16, "long_prefill_threshold": 16}),
    ("gemma4_moe", greedy(4), CHUNKS),
]  # fmt: skip


@pytest.fixture
def short_splits(monkeypatch):
    """Makes the short contexts of these tests long enough for splits."""
    config = triton_mla.mla_config
    monkeypatch.setattr(triton_mla, "mla_config", lambda *x: replace(config(*x), split_tokens=16))


@pytest.mark.parametrize(("family", "params", "options"), CASES)
def test_tokens_match_the_cpu(short_splits, family, params, options):
    """Two equal runs, compared with prompts that the CPU runs one at a time. The engine waits only
    for tokens, decodes are CUDA graphs, and all memory is freed."""
    options = {"num_kv_blocks": 60} | options
    runs, directory = options.pop("runs", 2), checkpoint(family, **options.pop("fields", {}))
    plain = make_engine(
        directory, **SIZES, num_kv_blocks=60, attention_backend="naive",
        enable_prefix_caching=False,
    )  # fmt: skip
    expected = [tokens(run(plain, [prompt], params))[0] for prompt in PROMPTS]
    with EmulatedGPU() as gpu:
        engine = make_engine(directory, **SIZES, **ON_GPU, **options)
        gpu.waits.clear()
        for _ in range(runs):
            assert tokens(run(engine, PROMPTS, params)) == expected
        scored = params.prompt_logprobs is not None  # fetching prompt logprobs synchronizes
        assert scored or (set(gpu.waits) == WAIT and gpu.num_replayed > 2 * runs)
        stats = engine.stats()
        engine.close()
        assert not gpu.disorder
        assert gpu.num_allocated == 0
    assert runs == 1 or stats.cache_hit_tokens > 16
    assert (stats.preemptions > 0) is (options["num_kv_blocks"] == 7)
    if "kv_lora_rank" in FAMILIES[family][1]:
        assert "bmm" in gpu.kernels


def test_log_probabilities_of_mla_match_the_cpu():
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def prompt_logprobs(**options):
        engine = make_engine(
            checkpoint("deepseek_v3"), **SIZES, num_kv_blocks=20, max_num_batched_tokens=16,
            **options,
        )  # fmt: skip
        results = run(engine, PROMPTS[:3], params)
        engine.close()
        return [
            [entry.logprob for entries in result.prompt_logprobs for entry in entries]
            for result in results
        ]

    expected = prompt_logprobs(attention_backend="naive")
    with EmulatedGPU():
        found = prompt_logprobs(**ON_GPU)
    for values, reference in zip(found, expected, strict=True):
        assert values == pytest.approx(reference, abs=2e-4)


def test_kernel_launches_per_layer():
    """A dense family, a prompt and decodes without graphs or splits: 14 launches per layer,
    including the MLP. The fourth step has nothing to run."""
    launches = {}
    with EmulatedGPU() as gpu:
        for layers in (1, 3):
            engine = make_engine(
                checkpoint("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=layers),
                **SIZES, **ON_GPU, num_kv_blocks=40, enforce_eager=True,
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
        "mm": 6, "rms_norm_kernel": 3, "rotate_latents_kernel": 1, "bmm": 2, "mla_kernel": 1,
        "gate_kernel": 1,
    }  # fmt: skip
    assert len(launches[1]) == 4
    for one_layer, three_layers in list(zip(launches[1], launches[3], strict=True))[:3]:
        found = Counter(three_layers) - Counter(one_layer)
        assert found == {name: 2 * count for name, count in expected.items()}


def test_two_ranks_generate_the_tokens_of_one():
    """Runs in the interpreter, because the emulated GPU is a single device, and in processes,
    because the interpreter is not thread-safe."""
    directory, prompts = checkpoint("deepseek_v3"), PROMPTS[2:]
    one = make_engine(directory, **SIZES, num_kv_blocks=20)
    expected = tokens(run(one, prompts, greedy(3)))
    two = make_engine(
        directory, **SIZES, num_kv_blocks=20, attention_backend="triton", tensor_parallel_size=2
    )
    assert tokens(run(two, prompts, greedy(3))) == expected
    two.close()


def test_a_model_stored_in_fp8_gives_the_tokens_of_its_float_weights(tmp_path):
    """The blocks are 128 x 128, as in DeepSeek-V3."""
    floats = write_case(tmp_path, "block", "deepseek_v3", **STORED_SIZES)
    plain = make_engine(str(floats), **SIZES, num_kv_blocks=9, attention_backend="naive")
    expected = tokens(run(plain, PROMPTS[2:3], greedy(3)))
    with EmulatedGPU() as gpu:
        engine = make_engine(str(tmp_path / "quantized"), **SIZES, **ON_GPU, num_kv_blocks=9)
        assert tokens(run(engine, PROMPTS[2:3], greedy(3))) == expected
        engine.close()
        assert gpu.num_allocated == 0


@pytest.mark.parametrize(("family", "max_launches"), [("qwen3_5", 60), ("lfm2", 50), ("bamba", 60)])
def test_launches_are_independent_of_the_number_of_prompts(family, max_launches):
    """Counts per step: all prompts, then decodes. The first decode also updates new rows."""
    directory, launches = checkpoint(family), []
    with EmulatedGPU() as gpu:
        engine = make_engine(directory, **SIZES, **ON_GPU, num_kv_blocks=40)
        for lengths in ([20], [9, 2, 11]):
            launches.append([])
            for prompt in random_prompts(len(lengths), lengths):
                engine.add_request(str(prompt), prompt, greedy(3))
            while engine.has_unfinished():
                gpu.kernels.clear()
                engine.step()
                launches[-1].append(sum(gpu.kernels.values()))
        engine.close()
    assert launches[0] == launches[1]
    prompts, *decodes = launches[0]
    assert prompts <= max_launches
    assert max(decodes) <= 9


def test_dependent_decodes_are_not_replayed_as_a_graph():
    """The second sequence starts from the state that the first one writes after block 0 in the same
    step, and computes one token. The third sequence is independent."""
    directory = checkpoint("lfm2")
    with EmulatedGPU():
        engine = make_engine(directory, **SIZES, **ON_GPU, num_kv_blocks=40)
        step: DecodeStep = engine.executor.graphed.step
        table = engine.executor.input_batch.block_tables[-1]
        table[0, 0] = table[1, 0] = 40
        table[1, 1], table[2, 0] = 41, 42
        dependent, independent = StepPlan(step=0), StepPlan(step=0)
        for plan, row in ((dependent, 1), (independent, 2)):
            plan.add(0, 15, 1, num_logits=1)
            plan.add(row, 17 - row, 1, num_logits=1)
        assert step.fits(independent)
        assert not step.fits(dependent)
        engine.close()
