"""Norms that are a part of what follows them, interpreted: what layers in plain torch compute."""

import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.attention import triton as attention
from nanoengine.attention.base import AttentionBackend
from nanoengine.errors import EngineDeadError
from nanoengine.features.new_weights import load_weights
from nanoengine.kernels import triton_gemm, triton_layers
from nanoengine.kernels.triton_layers import Unnormed
from nanoengine.layers import triton_folded
from nanoengine.layers.kernels import GATES, Kernels
from nanoengine.layers.triton_folded import FoldedLayer
from nanoengine.layers.triton_linear import GemmConfig, gate, multiply
from nanoengine.settings.params import SamplingParams
from tests.attention.test_triton_rotate import LENGTHS, backend_for
from tests.support.attention_cases import DEVICE, heads_of, make_case, norm_of, rotation_of
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import DenseAttention

pytestmark = pytest.mark.guards("nanoengine/*/triton*.py", "nanoengine/attention/*.py")

EPS = 1e-6
SHAPE = {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 80}
OPTIONS = {
    "dtype": "float32", "attention_backend": "triton", "block_size": 16, "num_kv_blocks": 24,
    "max_num_seqs": 4, "max_num_batched_tokens": 12, "enable_prefix_caching": False,
}  # fmt: skip
PROMPTS = random_prompts(3, [5, 14, 3], vocab_size=64)
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3)
SMALL = GemmConfig(rows=16, columns=16, inputs=32, warps=4, stages=2)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rows_like(x, width=32, biased=False):
    """Fewer at a time than a row has, so that there are several, and a rest."""
    return Unnormed(x.shape[1], width, EPS, biased)


def rms(x):
    return (x.square().mean(1, keepdim=True) + EPS).rsqrt()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_heads_of_rows_that_were_not_normed(norm, biased):
    case = make_case(*LENGTHS, num_kv_heads=2, group_size=2)
    backend, heads, x = backend_for(case), heads_of(case), 5 * numbers(5, 80)
    bias = numbers(heads[0].numel(), seed=1) if biased else None
    normed = heads * rms(x)[:, :, None]
    if biased:
        normed = normed + bias.view(heads[0].shape)
    rest = rotation_of(case, torch.float32), norm_of(case, False) if norm else None
    plain, ours = case.copied_cache(), case.copied_cache()
    expected = AttentionBackend.rotate_and_store(backend, normed, *rest, plain, case.batch)
    of = rows_like(x, biased=biased)
    close(backend.rotate_and_store(heads, *rest, ours, case.batch, x, of, bias), expected)
    for mine, other in zip(ours[:2], plain[:2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", list(GATES))
def test_gates_of_rows_that_were_not_normed(activation):
    x, weight = 3 * numbers(5, 80), numbers(2 * 40, 80, seed=1)
    expected = Kernels(DenseAttention()).gate((x * rms(x)) @ weight.T, activation)
    close(gate(x @ weight.T, activation, x, rows_like(x)), expected)
    close(multiply(x, weight, None, activation, SMALL, EPS), expected)


def engine_of(family, **overrides):
    options = OPTIONS | {k: overrides.pop(k) for k in list(overrides) if k in OPTIONS}
    return make_engine(checkpoint(family, **SHAPE | overrides), **options)


def scores(engine):
    """Log-probabilities of all tokens, prompts in chunks beside decodes."""
    found = run(engine, PROMPTS, replace(PARAMS, prompt_logprobs=0))
    engine.close()
    known = [
        line
        for one in found
        for line in (*one.prompt_logprobs[1:], *one.sequences[0].extras.logprobs)
    ]
    return tokens(found), torch.tensor([value for line in known for _, value, *_ in line])


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_model_says_what_it_says_in_plain_torch(family, monkeypatch):
    expected = scores(engine_of(family, attention_backend="naive"))
    monkeypatch.setattr(triton_folded, "WIDTH", 32)
    for config in (None, SMALL):  # as many rows have it, and as few
        monkeypatch.setattr(triton_folded, "gate_config", lambda *_, config=config: config)
        engine = engine_of(family)
        assert all(type(one) is FoldedLayer for one in engine.executor.model.model.stack)
        ours = scores(engine)
        assert ours[0] == expected[0]
        close(ours[1], expected[1])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"dtype": "float16"}), ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True}), ("gemma3", {"num_hidden_layers": 3}),
    ],
)  # fmt: skip
def test_other_layers_stay_as_they_are(family, overrides):
    engine = engine_of(family, **overrides)
    assert not any(type(one) is FoldedLayer for one in engine.executor.model.model.stack)
    engine.close()


def test_a_layer_is_seven_kernels_or_six(monkeypatch):
    launched = []

    def count(module, name, label):
        real = getattr(module, name)

        class Count:
            def __getitem__(self, grid):
                launched.append(label)
                return real[grid]

        monkeypatch.setattr(module, name, Count())

    for module, name in (
        (triton_layers, "rms_norm_kernel"), (triton_layers, "gate_kernel"),
        (triton_gemm, "gemm_kernel"), (attention.store_kernels, "rotate_store_kernel"),
        (attention.kernels, "decode_kernel"),
    ):  # fmt: skip
        count(module, name, name)
    for owner, name in ((torch, "mm"), (torch.Tensor, "addmm_")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, real=real, name=name, **k: launched.append(name) or real(*a, **k),
        )
    for config, gates in ((None, ["mm", "gate_kernel"]), (SMALL, ["gemm_kernel"])):
        monkeypatch.setattr(triton_folded, "gate_config", lambda *_, config=config: config)
        engine = engine_of("qwen3")
        engine.add_request("0", PROMPTS[0], PARAMS)
        engine.step()
        launched.clear()
        engine.step()
        layer = ["mm", "rotate_store_kernel", "decode_kernel", "addmm_", *gates, "addmm_"]
        assert launched == [*layer, *layer, "rms_norm_kernel"]
        engine.close()


# --- new weights ----------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints of one shape, whose norms differ, too."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "qwen3", **SHAPE)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: (t + 0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for name, t in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors")
    return folders


@pytest.mark.parametrize("backwards", [False, True])
def test_new_weights_come_in_any_order_and_in_calls_of_their_own(pair, backwards):
    old, new = (str(folder) for folder in pair)
    expected = scores(make_engine(new, **OPTIONS))
    engine = make_engine(old, **OPTIONS)
    run(engine, PROMPTS[:1], PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = sorted(load_file(pair[1] / "model.safetensors").items(), reverse=backwards)
        for one in named:
            load_weights(engine, [one])
        ours = scores(engine)
    assert ours[0] == expected[0]
    assert torch.equal(ours[1], expected[1])


def test_a_norm_that_comes_alone_is_multiplied_in_with_a_warning(pair):
    old = str(pair[0])
    norms = {n: t for n, t in load_file(pair[1] / "model.safetensors").items() if "layernorm" in n}
    plain = make_engine(old, **OPTIONS | {"attention_backend": "naive"})
    load_weights(plain, norms)
    expected = scores(plain)
    engine = make_engine(old, **OPTIONS)
    load_weights(engine, norms)
    with pytest.warns(UserWarning, match="without a matrix behind it"):
        ours = scores(engine)
    assert ours[0] == expected[0]
    close(ours[1], expected[1])


def test_a_norm_of_zeros_can_not_come_back_alone(pair):
    tensors = load_file(pair[0] / "model.safetensors")
    engine = make_engine(str(pair[0]), **OPTIONS)
    name = "model.layers.0.input_layernorm.weight"
    load_weights(engine, {name: torch.zeros_like(tensors[name])})
    with pytest.warns(UserWarning, match="without a matrix"):
        run(engine, PROMPTS[:1], PARAMS)
    load_weights(engine, {name: tensors[name]})
    with pytest.raises(EngineDeadError, match="0 before"):
        run(engine, PROMPTS[:1], PARAMS)
    engine.close()
