"""16-bit weights on a CPU: stored in 16 bits, multiplied in float32 or as bfloat16 products."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.checkpoint.find import resolve_dtype
from nanoengine.errors import ConfigError
from nanoengine.kernels import cpu_linear
from nanoengine.kernels.isa import CURRENT
from nanoengine.layers.packed import PackedLinear
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_checkpoints import write_case

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
PROMPTS = [[5, 9, 11, 7, 30, 2], [5, 9, 11, 7, 30, 2, 8, 8, 8, 1], [40]]


def layer(weight: torch.Tensor, *, kind: type[PackedLinear] = PackedLinear, **options: bool):
    method = kind("lm_head", **options)
    method.create(weight.shape, weight.dtype, CPU)
    method.load(weight)
    method.finish()
    return method


def random_weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(outputs)
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 100])
def test_a_16_bit_weight_has_the_bits_of_its_float32_copy(dtype, rows):
    weight = random_weight(53, 96, dtype)
    x, bias = torch.randn(rows, 96), torch.randn(53)
    in_16_bits, in_32_bits = layer(weight), layer(weight.float())
    assert in_16_bits.weight.dtype == dtype
    assert torch.equal(in_16_bits.apply(x, bias), in_32_bits.apply(x, bias))
    ids = torch.tensor([0, 52, 17, 48])
    assert torch.equal(in_16_bits.rows(ids), weight[ids].float())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33])
def test_bfloat16_products_are_exact_and_added_in_float32(rows):
    weight = random_weight(37, 128, torch.bfloat16)
    x = torch.randn(rows, 128)
    result = layer(weight, rounds_inputs=True).apply(x, None)
    # The reference: the rounded values in the layer that computes in float32.
    rounded = layer(weight).apply(x.bfloat16().float(), None)
    assert torch.equal(result, rounded)
    exact = x.bfloat16().double() @ weight.double().T
    assert (result - exact).abs().max() < 1e-5
    alone = torch.cat([layer(weight, rounds_inputs=True).apply(row[None], None) for row in x])
    assert torch.equal(result, alone), "the result of a row depends on other rows"


def test_inputs_are_rounded_half_to_even_and_nan_stays_nan():
    x = torch.tensor([[1.00390625, 1.01171875, -3.0e38, float("nan")]])  # ties in both directions
    out = cpu_linear.round_to_bf16(x.numpy(), 1)
    if cpu_linear.BF16_DOTS:  # pairs, the first in the high half
        out = np.stack((out & np.uint32(0xFFFF0000), out << np.uint32(16)), -1).view(np.float32)
    assert np.array_equal(out.reshape(x.shape), x.bfloat16().float().numpy(), equal_nan=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A bfloat16 checkpoint, and the same values in float32."""
    bfloat16_dir = tmp_path_factory.mktemp("bfloat16")
    make_checkpoint(bfloat16_dir, "qwen3", dtype=torch.bfloat16)
    float32_dir = tmp_path_factory.mktemp("float32")
    weights = {name: w.float() for name, w in load_file(bfloat16_dir / "model.safetensors").items()}
    save_file(weights, float32_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((bfloat16_dir / "config.json").read_text())
    (float32_dir / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return bfloat16_dir, float32_dir


def outputs(directory, **options):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    with LLM(directory, skip_tokenizer_init=True, num_kv_blocks=64, **options) as llm:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        records = [
            [{i: one.logprob for i, one in step.items()} for step in o.outputs[0].logprobs]
            for o in found
        ]
        return [list(o.outputs[0].token_ids) for o in found], records, llm.info


def test_a_bfloat16_checkpoint_in_float32_has_the_bits_of_a_float32_one(checkpoint):
    bfloat16_dir, float32_dir = checkpoint
    tokens, logprobs, info = outputs(bfloat16_dir, dtype="float32")
    assert (tokens, logprobs) == outputs(float32_dir)[:2]
    whole = outputs(float32_dir)[2].weight_bytes
    assert info.dtype == "float32"
    assert info.weight_bytes < 0.52 * whole, "only norms stay float32"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_bfloat16_is_close_to_float32_and_halves_the_cache(family, tmp_path):
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    _, exact, wide = outputs(tmp_path, dtype="float32")
    _, rounded, info = outputs(tmp_path, dtype="bfloat16")
    assert info.dtype == "bfloat16"
    assert info.block_bytes == wide.block_bytes // 2
    for expected, found in zip(exact, rounded, strict=True):
        common = expected[0].keys() & found[0].keys()  # the first token, after the same prompt
        assert common
        assert all(abs(expected[0][i] - found[0][i]) < 0.1 for i in common)
    assert exact != rounded


def test_bfloat16_outputs_are_the_same_alone_and_in_a_batch(checkpoint):
    bfloat16_dir, _ = checkpoint
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(bfloat16_dir, dtype="bfloat16", skip_tokenizer_init=True, num_kv_blocks=64) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.reset_prefix_cache()
        for prompt, output in zip(PROMPTS, together, strict=True):
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob
            llm.reset_prefix_cache()


def test_a_float32_matrix_of_a_16_bit_checkpoint_is_not_rounded(checkpoint, tmp_path):
    bfloat16_dir, float32_dir = checkpoint
    weights = load_file(bfloat16_dir / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].float() * 1.001
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((bfloat16_dir / "config.json").read_text())
    info = outputs(tmp_path, dtype="float32")[2]
    assert info.weight_bytes == outputs(float32_dir)[2].weight_bytes


def test_auto_selects_bfloat16_on_a_cpu_with_bfloat16_dot_products():
    best = torch.bfloat16 if CURRENT.bf16_dots != "generic" else torch.float32
    assert resolve_dtype("auto", "bfloat16", CPU) == best
    assert resolve_dtype("auto", "bfloat16", CPU, quantized=True) == torch.float32
    assert resolve_dtype("auto", "bfloat16", CPU, backend="naive") == torch.float32
    assert resolve_dtype("auto", "float16", CPU) == torch.float32
    assert resolve_dtype("float32", "bfloat16", CPU) == torch.float32


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "glm4"])
def test_float16_raises_for_families_with_large_activations(family, tmp_path):
    make_checkpoint(tmp_path, family, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"float16 is not supported.*bfloat16 or float32"):
        outputs(tmp_path, dtype="float16")
    assert outputs(tmp_path, dtype="auto")[2].dtype == "float32"


def test_an_odd_number_of_inputs_requires_float32(tmp_path):
    """bfloat16 weights are stored in pairs of inputs, and float16 weights are read in pairs."""
    make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, intermediate_size=97)
    assert outputs(tmp_path, dtype="float32")[2].weight_bytes > 4 * 2 * 64 * 97 * 3
    with pytest.raises(
        ConfigError, match=r"even number of inputs.*intermediate_size=97.*dtype='float32'"
    ):
        outputs(tmp_path, dtype="bfloat16")


def test_experts_stay_16_bit_unless_their_size_is_odd(tmp_path):
    """A mixture of experts in a 16-bit checkpoint stays 16-bit, unless experts have an odd size."""
    for size, stays_16_bit in ((32, True), (33, False)):
        directory = tmp_path / str(size)
        make_checkpoint(directory, "qwen3_moe", dtype=torch.bfloat16, moe_intermediate_size=size)
        *_, info = outputs(directory, dtype="float32")
        assert (info.weight_bytes < 3 * info.num_parameters) == stays_16_bit
    with pytest.raises(ConfigError, match=r"even number of inputs.*moe_intermediate_size=33"):
        outputs(tmp_path / "33", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_of_a_quantized_model_stays_16_bit(tied, dtype, tmp_path):
    """The embedding stays in 16 bits, tied to a quantized head or not."""
    make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    with LLM(
        tmp_path, quantization="int8", dtype=dtype, skip_tokenizer_init=True, num_kv_blocks=64
    ) as llm:
        assert llm.engine.executor.model.model.embed_tokens.weight.dtype == torch.bfloat16
    from_16_bits = outputs(tmp_path, quantization="int8", dtype=dtype)[:2]
    file = tmp_path / "model.safetensors"
    save_file({n: w.float() for n, w in load_file(file).items()}, file, metadata={"format": "pt"})
    if dtype == "float32":
        assert from_16_bits == outputs(tmp_path, quantization="int8", dtype=dtype)[:2]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_unquantized_layers_of_a_quantized_checkpoint_stay_16_bit(dtype, tmp_path):
    """The integer tensors do not set the dtype of the unquantized layers."""
    write_case(tmp_path, "gptq")
    file = tmp_path / "quantized" / "model.safetensors"
    floats = torch.float16 if dtype == "auto" else torch.float64
    stored = load_file(file).items()
    stored = {n: t.to(floats) if t.dtype == torch.float64 else t for n, t in stored}
    save_file(stored, file, metadata={"format": "pt"})
    raw = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(raw | {"dtype": "float16"}))
    with LLM(file.parent, dtype=dtype, skip_tokenizer_init=True, num_kv_blocks=64) as llm:
        model = llm.engine.executor.model
        expected = torch.float16 if dtype == "auto" else torch.bfloat16
        assert (
            model.model.embed_tokens.weight.dtype == model.lm_head.method.weight.dtype == expected
        )
    assert len(outputs(file.parent, dtype=dtype)[0]) == len(PROMPTS)


def test_16_bit_layers_reject_an_odd_number_of_inputs():
    """The kernel would ignore the last input."""
    for dtype in DTYPES:
        with pytest.raises(AssertionError):
            layer(torch.ones(16, 5, dtype=dtype))
