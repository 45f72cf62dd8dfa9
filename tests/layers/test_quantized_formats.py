"""GPTQ, AWQ, compressed-tensors and fp8 checkpoints against the same weights as floats: multiplied
in their stored format, and dequantized while loading."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from nanoengine import build as build_module
from nanoengine.checkpoint.quantization import StoredQuantization, resolve_quantization
from nanoengine.checkpoint.quantization_parsers import parse_quantization
from nanoengine.errors import ConfigError, UnsupportedModelError, WeightLoadError
from nanoengine.kernels.code_tables import E2M1
from nanoengine.layers.collectives import Shard
from nanoengine.layers.cpu_quantized import CPUWeightOnlyLinear
from nanoengine.layers.kernels import UnquantizedLinear
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import unpack_words
from nanoengine.layers.quantized_weight import QuantizedWeight
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.model_helpers import all_logits, build, random_prompts
from tests.support.quantized_checkpoints import (
    AWQ,
    CASES,
    FP4,
    FP8,
    GPTQ,
    MIXED,
    SMALL_FLOATS,
    Tensors,
    compressed,
    fill_words,
    fp8,
    group,
    int_config,
    load_dequantized_model,
    load_quantized_model,
    write_case,
)

PROMPTS = random_prompts(9, 3)


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_model_matches_its_float_weights(case: str, tmp_path: Path) -> None:
    floats, directory = write_case(tmp_path, case), tmp_path / "quantized"
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    atol = 1e-9 if case in SMALL_FLOATS else 1e-5 * float(expected.std())
    option = "int8_weight_only" if case == "int-quantized" else None
    model = load_quantized_model(directory, option)
    assert (all_logits(model, PROMPTS) - expected).abs().max() < atol
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    counts = {"fp8-some": 5, "gptq-head": 9, "awq-some": 2, "pack-quantized-ignore": 2}
    assert len(layers) == counts.get(case, 8)
    assert all(m.values.element_size() == 1 for m in layers), "one byte per weight, or half a byte"
    drawn = getattr(CASES[case][1], "keywords", {})
    if case not in SMALL_FLOATS:
        assert layers[0].bits == drawn.get("bits", 4)
        assert (layers[0].zeros is None) == drawn.get("symmetric", False)
    assert (layers[0].order is not None) == drawn.get("is_scattered", False)
    dequantized = load_dequantized_model(directory)
    methods = [m.method for m in dequantized.modules() if getattr(m, "method", None)]
    assert all(type(method) is UnquantizedLinear for method in methods)
    assert (all_logits(dequantized, PROMPTS) - expected).abs().max() < atol
    single = load_quantized_model(directory, option, dtype=torch.float32)
    assert any(isinstance(m, CPUWeightOnlyLinear) for m in single.modules())
    assert (all_logits(single, PROMPTS) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize(
    ("family", "case", "overrides"),
    [
        *(("qwen3_moe", case, {"head_dim": 32}) for case in ("fp8", "nvfp4", "awq")),  # experts
        ("phi3", "fp8", {}), ("phi3", "awq", {}),  # merged matrices
        ("ernie4_5", "awq", {}),  # interleaved RoPE
    ],
)  # fmt: skip
def test_other_families_match_their_float_weights(
    family: str, case: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    floats = write_case(tmp_path, case, family, **overrides)
    prompts = random_prompts(12, 3)
    expected = all_logits(build(floats, torch.float64), prompts)
    for make in (load_quantized_model, load_dequantized_model):
        assert (all_logits(make(tmp_path / "quantized"), prompts) - expected).abs().max() < 1e-9
    single = load_quantized_model(tmp_path / "quantized", dtype=torch.float32)
    assert (all_logits(single, prompts) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("case", ["gptq-desc-act", "awq", "int-quantized"])
def test_quantized_models_run_with_quantized_activations(case: str, tmp_path: Path) -> None:
    floats, bits = write_case(tmp_path, case), 8 if case == "int-quantized" else 4
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    found = all_logits(load_quantized_model(tmp_path / "quantized", f"int{bits}"), PROMPTS)
    assert 1e-4 * expected.std() < (found - expected).abs().max() < 0.5 * expected.std()
    engine = make_engine(str(tmp_path / "quantized"))
    activations = "int8" if case == "int-quantized" else "float"
    layout = {"gptq-desc-act": "gptq"}.get(case, case)
    assert engine.info.quantization == (
        f"int{bits} weights (stored as {layout}), {activations} activations"
    )
    if activations == "float":
        assert tokens(run(engine, PROMPTS, greedy(8))) == tokens(
            run(make_engine(str(floats)), PROMPTS, greedy(8))
        )
    with pytest.raises(ConfigError, match="contradicts the checkpoint"):
        make_engine(str(tmp_path / "quantized"), quantization=f"int{12 - bits}")


def test_nvfp4_with_int8_activations_has_a_kernel(tmp_path: Path) -> None:
    expected = all_logits(build(write_case(tmp_path, "nvfp4")), PROMPTS)
    model = load_quantized_model(tmp_path / "quantized", "int4", dtype=torch.float32)
    assert model.model.layers[0].mlp.down_proj.method.form == "grouped"
    error = (all_logits(model, PROMPTS) - expected).abs().max()
    assert 1e-4 * expected.std() < error < 0.5 * expected.std()


@pytest.mark.parametrize("case", ["fp8", "mixed"])
def test_generated_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    floats = write_case(tmp_path, case)
    oracle = AutoModelForCausalLM.from_pretrained(floats).eval()
    prompts = torch.tensor(random_prompts(12, 12))
    greedy_options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = oracle.generate(prompts, attention_mask=torch.ones_like(prompts), **greedy_options)
    for backend in ("cpu", "naive"):
        options = {"attention_backend": backend, "dtype": "float32"}
        engine = make_engine(str(tmp_path / "quantized"), **options)
        found = tokens(run(engine, prompts.tolist(), greedy(8)))
        assert found == [[row] for row in expected[:, 12:].tolist()]
    formats = "fp8" if case == "fp8" else "float-quantized and nvfp4-pack-quantized"
    kind = "fp8" if case == "fp8" else "fp4, fp8"
    assert engine.info.quantization == f"{kind} weights (stored as {formats}), float activations"
    named = "fp8" if case == "fp8" else "compressed-tensors"
    assert make_engine(str(tmp_path / "quantized"), quantization=named).info.weight_bits == 8
    for option in ("int8", "int8_weight_only", "int4"):
        with pytest.raises(ConfigError, match=rf"contradicts .* {kind} \(.*remove the option$"):
            make_engine(str(tmp_path / "quantized"), quantization=option)


@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_weights_without_a_kernel_are_dequantized(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the configuration of a GPU, on this CPU."""
    on_gpu = partial(resolve_quantization, device="cuda")
    monkeypatch.setattr(build_module, "resolve_quantization", lambda *given, device: on_gpu(*given))
    floats, prompts = write_case(tmp_path, "mixed"), random_prompts(12, 5)
    options = {"attention_backend": backend, "dtype": "float32"}
    engine = make_engine(str(tmp_path / "quantized"), **options)
    assert "stored in fp4, fp8 are dequantized to torch.float32" in caplog.text
    assert (engine.info.quantization, engine.info.weight_bits) == (None, None)
    found = tokens(run(engine, prompts, greedy(8)))
    plain = make_engine(str(floats), **options)
    assert engine.info.weight_bytes == plain.info.weight_bytes
    assert found == tokens(run(plain, prompts, greedy(8)))


def test_fp8_blocks_match_transformers() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    tensors, values = fp8(weight, "")
    found = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"])
    assert torch.equal(found, values)


@pytest.mark.parametrize("case", ["gptq", "pack-quantized-zeros", "fp8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part(case: str, rank: int, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 512, "head_dim": 64} if case == "fp8" else {}
    write_case(tmp_path, case, **{"intermediate_size": 128, **sizes})
    models = [
        make(tmp_path / "quantized", **fields).model.layers[1].mlp
        for make in (load_quantized_model, load_dequantized_model)
        for fields in ({}, {"shard": Shard(rank, 2)})
    ]
    for names, whole, part in (
        (("values", "scales"), *models[:2]), (("weight",), *models[2:])
    ):  # fmt: skip
        for name in names:
            full, cut = getattr(whole.down_proj.method, name), getattr(part.down_proj.method, name)
            assert torch.equal(cut, full.chunk(2, 1)[rank])
            full = getattr(whole.gate_up_proj.method, name)
            both = torch.cat([half.chunk(2)[rank] for half in full.chunk(2)])
            assert torch.equal(getattr(part.gate_up_proj.method, name), both)


def test_a_rank_of_dequantized_weights_may_split_a_group(tmp_path: Path) -> None:
    write_case(tmp_path, "fp8")
    directory, shard = tmp_path / "quantized", Shard(1, 2)
    whole = load_dequantized_model(directory).model.layers[0].mlp.down_proj.method
    part = load_dequantized_model(directory, shard=shard).model.layers[0].mlp.down_proj.method
    assert torch.equal(part.weight, whole.weight[:, 96:])
    with pytest.raises(WeightLoadError, match="cut through the quantized groups"):
        load_quantized_model(directory, shard=shard)


def test_dummy_weights_work_with_every_loader(tmp_path: Path) -> None:
    write_case(tmp_path, "fp8")
    for make in (load_quantized_model, load_dequantized_model):
        model = make(tmp_path / "quantized", dtype=torch.float32, load_format="dummy")
        assert all_logits(model, PROMPTS).isfinite().all()


def test_biases_of_quantized_layers_are_loaded(tmp_path: Path) -> None:
    """The model's own biases, and the zero biases that GPTQ writers add to layers without one."""
    floats = write_case(tmp_path, "gptq", "qwen2")
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    quantized = tmp_path / "quantized"
    assert (
        all_logits(load_quantized_model(quantized), PROMPTS) - expected
    ).abs().max() < 1e-5 * expected.std()
    file = quantized / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(stored | {name: torch.zeros(64)}, file)
    assert (
        all_logits(load_quantized_model(quantized), PROMPTS) - expected
    ).abs().max() < 1e-5 * expected.std()
    save_file(stored | {name: torch.ones(64)}, file)
    with pytest.raises(WeightLoadError, match=r"0\.mlp\.down_proj: .* nonzero bias"):
        load_quantized_model(quantized)


def test_gptq_without_g_idx_is_supported(tmp_path: Path) -> None:
    floats = write_case(tmp_path, "gptq")
    edit(tmp_path / "quantized", lambda t: [t.pop(n) for n in list(t) if n.endswith("g_idx")])
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    found = all_logits(load_quantized_model(tmp_path / "quantized"), PROMPTS)
    assert (found - expected).abs().max() < 1e-5 * expected.std()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_from_the_low_bits(bits: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (3, 64))
    words = fill_words(values, bits)
    assert (words < 0).any(), "some words must have the sign bit set"
    assert torch.equal(unpack_words(words, bits), torch.from_numpy(values).int())


# --- the kernel -----------------------------------------------------------------------------------


def weight_of(form: str) -> QuantizedWeight:
    """Every possible code, in a matrix with an incomplete output panel."""
    generator = torch.Generator().manual_seed(1)
    codes, group_size = torch.randint(0, 256, (88, 192), generator=generator), 32
    scales = torch.rand(88, 6, generator=generator) + 0.5
    fields: dict[str, Any] = {"bits": 4}
    if form == "e4m3":
        values = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.int8)
        fields = {"bits": 8, "floats": True}
    elif form == "e2m1":
        values, fields["table"] = torch.tensor(E2M1, dtype=torch.int8)[codes % 16], E2M1
    elif form == "int4":
        values = (codes % 16 - 8).to(torch.int8)
    else:
        values, fields["bits"] = (codes - 128).to(torch.int8), 8
    zeros = torch.randint(-8, 8, (88, 6), generator=generator).float() if "zeros" in form else None
    return QuantizedWeight(
        values=values, scales=scales, zeros=zeros, group_size=group_size, **fields
    )


@pytest.mark.parametrize("form", ["e4m3", "e2m1", "int4", "int8", "int8 with zeros"])
def test_the_kernel_dequantizes_every_code_exactly(form: str) -> None:
    weight = weight_of(form)
    method = CPUWeightOnlyLinear("layer", bits=weight.bits, group_size=32, activations="float")
    method.create((88, 192), torch.float32, torch.device("cpu"))
    method.load_quantized(weight)
    assert torch.equal(method.apply(torch.eye(192), None).T, weight.dequantized())
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(2))
    whole = method.apply(x, None)
    torch.testing.assert_close(whole, x @ weight.dequantized().T, rtol=1e-4, atol=1e-3 * 448)
    for rows in (1, 2, 5, 33):
        assert torch.equal(method.apply(x[:rows], None), whole[:rows]), (
            "other bits in another batch"
        )


# --- unsupported checkpoints ----------------------------------------------------------------------


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
BROKEN: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": ("gptq", lambda t: t.pop(f"{Q}.scales"), rf"missing: {Q}\.scales"),
    "floats where the config says int4": (
        "awq",
        lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64)}),
        rf"unexpected: {Q}\.weight$",
    ),
    "another group size": (
        "awq",
        lambda t: t.update({f"{Q}.scales": torch.ones(4, 64)}),
        rf"mis-shaped: {Q}\.scales \[4, 64\], expected \[2, 64\]",
    ),
    "floats as words": (
        "gptq",
        lambda t: t.update({f"{Q}.qweight": torch.zeros(8, 64)}),
        rf"{Q}\.qweight in .* is torch\.float32, not torch\.int32$",
    ),
    "weight_shape": (
        "pack-quantized",
        lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 60])}),
        rf"{Q}: weight_shape is \[64, 60\], expected \[64, 64\]",
    ),
    "unequal g_idx of fused matrices": (
        "gptq-desc-act",
        lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"].flip(0)}),
        r"fused in model\.layers\.0\.self_attn\.qkv_proj are quantized differently .*g_idx",
    ),
    "scattered groups without g_idx": (
        "gptq-desc-act",
        lambda t: t.pop(f"{DOWN}.g_idx"),
        rf"missing: {DOWN}\.g_idx",
    ),
    "groups of unequal size": (
        "gptq",
        lambda t: t[f"{DOWN}.g_idx"].fill_(1),
        rf"{DOWN}: g_idx does not have 3 groups of 32 inputs",
    ),
    "a NaN weight": (
        "fp8", lambda t: t[f"{Q}.weight"].view(torch.uint8)[3, 5].fill_(0xFF),
        rf"{Q}: a weight is 0x7f or 0xff",
    ),
    "an infinite scale": (
        "channel", lambda t: t[f"{Q}.weight_scale"][7].fill_(torch.inf), rf"{Q}: a scale is NaN or",
    ),
    "a global scale of zero": (
        "nvfp4", lambda t: t[f"{Q}.weight_global_scale"].zero_(), rf"{Q}: a scale is NaN or",
    ),
    "no scale": (
        "fp8-older", lambda t: t.pop(f"{Q}.weight_scale"), rf"{Q}: expected one of weight",
    ),
    "other blocks": (
        "fp8", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1, 2)}),
        rf"mis-shaped: {Q}\.weight_scale_inv \[1, 2\], expected \[2, 2\]",
    ),
    "another float": (
        "fp8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e5m2)}),
        rf"{Q}\.weight in .* is torch\.float8_e5m2, not torch\.float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_wrong_tensors_are_named(case: str, tmp_path: Path) -> None:
    name, change, message = BROKEN[case]
    write_case(tmp_path, name)
    edit(tmp_path / "quantized", change)
    # Dequantization handles each matrix separately, with its own input order.
    for make in (load_quantized_model, *([] if "fused" in case else [load_dequantized_model])):
        with pytest.raises(WeightLoadError, match=message):
            make(tmp_path / "quantized")


# --- configs --------------------------------------------------------------------------------------


def test_configs_are_parsed() -> None:
    def parse(raw: dict[str, Any], *, tied: bool = False) -> StoredQuantization:
        return parse_quantization(raw, tied=tied)

    assert parse({**GPTQ, "group_size": 128}) == StoredQuantization(
        format="gptq", bits=4, group_size=128, zero_offset=1, skipped=("lm_head$",)
    )
    assert parse({**GPTQ, "checkpoint_format": "gptq_v2"}).zero_offset == 0
    assert parse({**GPTQ, "lm_head": True}).of("lm_head")
    assert not parse({**GPTQ, "lm_head": True}, tied=True).of("lm_head")
    assert parse({**AWQ, "group_size": -1}).group_size is None
    assert not parse(AWQ).of("lm_head")
    w8a8 = parse(int_config("int-quantized", num_bits=8, strategy="channel", group_size=None))
    assert (w8a8.activations, w8a8.bits, w8a8.group_size) == ("int8", 8, None)
    ignoring = parse({**int_config(), "ignore": ["re:.*mlp\\.", "model.layers.1.self_attn.o_proj"]})
    is_quantized = {
        name: ignoring.of(f"model.layers.{name}") is not None
        for name in ("1.mlp.gate_up_proj", "1.mlp.down_proj", "1.self_attn.o_proj",
                     "11.self_attn.o_proj", "1.self_attn.qkv_proj")
    }  # fmt: skip
    assert list(is_quantized.values()) == [False, False, False, True, True]
    assert ignoring.of("lm_head")
    some = parse({**int_config(), "ignore": ["model.layers.1.self_attn.q_proj"]})
    assert some.of("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(UnsupportedModelError, match=r"does not quantize .*1\.self_attn\.q_proj, "):
        some.of("model.layers.1.self_attn.qkv_proj")


def with_group(**fields: Any) -> dict[str, Any]:
    raw = int_config()
    return raw | {"config_groups": {"group_0": raw["config_groups"]["group_0"] | fields}}


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "quant_method='bitsandbytes'; supported: gptq, awq, compressed-tensors": {
        "quant_method": "bitsandbytes"
    },
    "quant_method=None": {"bits": 4},
    "of gptq has bits=3; supported: 4 or 8": {**GPTQ, "bits": 3},
    "of gptq has checkpoint_format='marlin'": {**GPTQ, "checkpoint_format": "marlin"},
    "of gptq has dynamic={'-:.*': {}}": {**GPTQ, "dynamic": {"-:.*": {}}},
    "has group_size=0": {**GPTQ, "group_size": 0},
    "of awq has bits=8; supported: 4": {**AWQ, "bits": 8},
    "of awq has version='gemv'; supported: 'gemm'": {**AWQ, "version": "gemv"},
    "of awq has zero_point=False": {**AWQ, "zero_point": False},
    "format='marlin-24'; supported: 'pack-quantized' or 'int-quantized'": int_config("marlin-24"),
    "weights.num_bits=2; supported: 4 or 8": int_config(num_bits=2),
    "weights.type='float'": int_config(type="float"),
    "weights.strategy='tensor'": int_config(strategy="tensor"),
    "input_activations={'num_bits': 8}": with_group(input_activations={"num_bits": 8}),
    "kv_cache_scheme={'num_bits': 4": {**int_config(), "kv_cache_scheme": {"num_bits": 4}},
    "has 0 config_groups": {**int_config(), "config_groups": {}},
    "quant_method must be a string, got ['gptq']": {"quant_method": ["gptq"]},
    "bits must be an integer, got '4'": {**GPTQ, "bits": "4"},
    "group_size must be an integer, got [128]": {**GPTQ, "group_size": [128]},
    "version must be a string, got 5": {**AWQ, "version": 5},
    "modules_to_not_convert[0] must be a string": {**AWQ, "modules_to_not_convert": [5]},
    "config_groups must be a dict, got [5]": {**int_config(), "config_groups": [5]},
    "config_groups['group_0'] must be a dict": {**int_config(), "config_groups": {"group_0": 5}},
    "weights must be a dict, got 5": with_group(weights=5),
    "num_bits must be an integer, got 4.0": int_config(num_bits=4.0),
    "symmetric must be True or False, got 1": int_config(symmetric=1),
    "ignore must be a list, got 're:.*'": {**int_config(), "ignore": "re:.*"},
    "'re:(', which is not a valid regular": {**int_config(), "ignore": ["re:("]},
    "none after a group": {**int_config(), "ignore": ["re:(a+)+$"]},
    "at most 4 quantifiers": {**int_config(), "ignore": ["re:.*.*.*.*.*q_proj"]},
    "sparsity_config.format='sparse-24": {
        **int_config(), "sparsity_config": {"format": "sparse-24-bitmask"}
    },
    "weight_block_size=[128]; supported: two positive integers": {
        **FP8, "weight_block_size": [128]
    },
    "activation_scheme='none'; supported: 'dynamic' or 'static'": {
        **FP8, "activation_scheme": "none"
    },
    "expert_dtype='fp4'": {**FP8, "expert_dtype": "fp4"},
    "modules_to_convert=['model.embed_tokens']": {
        **FP8, "modules_to_convert": ["model.embed_tokens"]
    },
    "modules_to_not_convert has 're:(a+)+'": {**FP8, "modules_to_not_convert": ["(a+)+"]},
    "weights.type='int'; supported: 'float'": compressed(
        group({"type": "int", "strategy": "channel"})
    ),
    "weights.block_structure=[]": compressed(group({"strategy": "block"})),
    "weights.group_size=32; supported: 16": compressed(
        group({**FP4, "group_size": 32}), layout="nvfp4-pack-quantized"
    ),
    "weights.num_bits=4; supported: 8": compressed(group({"num_bits": 4, "strategy": "channel"})),
    "input_activations={'type': 'int'}": compressed(
        {**group({"strategy": "channel"}), "input_activations": {"type": "int"}}
    ),
    "has 2 config_groups": compressed(
        group({"strategy": "channel"}),
        group({"type": "int", "strategy": "channel"}, format="int-quantized", input_activations={
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
        }),
    ),
    "targets has 're:(', which is not a valid regular": compressed(
        group({"strategy": "channel"}, ("re:(",))
    ),
    "kv_cache_scheme={'num_bits': 8, 'type': 'int'": {
        **compressed(group({"strategy": "channel"})),
        "kv_cache_scheme": {"num_bits": 8, "type": "int"},
    },
}  # fmt: skip


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_values_are_named(message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_quantization(UNSUPPORTED[message], tied=False)
    assert message in str(error.value)


def test_each_layer_has_one_scheme() -> None:
    layer = "model.layers.3"
    mixed = parse_quantization(MIXED, tied=False)
    schemes = {name: mixed.of(f"{layer}.{name}") for name in ("mlp.gate_up_proj", "mlp.down_proj")}
    assert [scheme and scheme.bits for scheme in schemes.values()] == [4, 8]
    assert mixed.of("lm_head") is None
    some = compressed(group({"strategy": "channel"}, ("re:.*self_attn", f"{layer}.mlp.gate_proj")))
    with pytest.raises(UnsupportedModelError, match=r"does not quantize .*3\.mlp\.gate_proj, "):
        parse_quantization(some, tied=False).of(f"{layer}.mlp.gate_up_proj")
    channel = group({"strategy": "channel"})
    both = parse_quantization(compressed(channel, channel), tied=False)
    with pytest.raises(UnsupportedModelError, match=r"2 config_groups for .*down_proj; supported"):
        both.of(f"{layer}.mlp.down_proj")


def test_kv_cache_schemes_are_parsed() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "minmax"}
    raw = {**compressed(group({"strategy": "channel"})), "kv_cache_scheme": scheme}
    expected = StoredQuantization(
        format="float-quantized", bits=8, group_size=None, symmetric=True, activations="e4m3"
    )
    floats = compressed({**group({"strategy": "channel"}), "input_activations": None})
    assert parse_quantization(floats, tied=False).activations == "float"
    assert parse_quantization(raw, tied=True).of("model.layers.0.mlp.down_proj") is not None
    assert parse_quantization({**raw, "ignore": []}, tied=False) == expected


def test_names_of_unconverted_modules_match_whole_components() -> None:
    names = ["lm_head", "model.layers.1", "mlp.gate", "model.layers.*.o_proj"]
    stored = parse_quantization({**FP8, "modules_to_not_convert": names}, tied=False)
    converted = ("model.layers.11.mlp.down_proj", "model.layers.2.mlp.gate_proj")
    assert all(stored.of(name) for name in converted)
    for name in ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.2.mlp.gate",
                 "model.layers.2.self_attn.o_proj"):  # fmt: skip
        assert stored.of(name) is None
