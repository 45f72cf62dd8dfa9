"""Checkpoints in GPTQ, AWQ and compressed-tensors layouts against the same weights as floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import StoredQuantization, resolve_quantization
from nanoengine.checkpoint.quantization_parsers import parse_quantization
from nanoengine.errors import ConfigError, UnsupportedModelError, WeightLoadError
from nanoengine.layers.collectives import Shard
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import unpack_words
from nanoengine.models.decoder import CausalLM
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.model_helpers import all_logits, build, cpu_kernels, random_prompts
from tests.support.quantized_checkpoints import (
    PROJECTIONS,
    Drawn,
    Tensors,
    awq,
    fill_words,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
)

PROMPTS = random_prompts(9, 3)
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip


def compressed(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A compressed-tensors config as llm-compressor writes it."""
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
             "group_size": 32, "dynamic": False, "actorder": None, **weights}  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": given,
        "input_activations": None if layout == "pack-quantized" else inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def scattered(rng: np.random.Generator, name: str, num_columns: int) -> np.ndarray:
    """desc_act: groups of 32 in a random order, equal for matrices of the same input."""
    beside = name.rpartition(".")[0]
    seed = sum(map(ord, beside)) + num_columns + ("o_proj" in name)
    return np.random.default_rng(seed).permutation(num_columns) // 32


CASES: dict[str, tuple[dict[str, Any], Callable[[Drawn], Tensors], dict[str, Any]]] = {
    "gptq": (GPTQ, gptq, {}),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, less=0), {}),
    "gptq-8-bit": ({**GPTQ, "bits": 8}, gptq, {"bits": 8}),
    "gptq-a-scale-a-row": ({**GPTQ, "group_size": -1}, gptq, {"group_size": None}),
    "gptq-desc-act": ({**GPTQ, "desc_act": True}, gptq, {"groups": scattered}),
    "gptq-head": (
        {**GPTQ, "lm_head": True},
        gptq,
        {"names": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                   "lm_head")},
    ),
    "awq": (AWQ, awq, {}),
    "awq-old-keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, awq, {},
    ),
    "awq-some": (
        {**AWQ, "modules_to_not_convert": ["down_proj", "self_attn"]},
        awq,
        {"names": ("gate_proj", "up_proj")},
    ),
    "pack-quantized": (compressed(), partial(pack_quantized, symmetric=True), {"symmetric": True}),
    "pack-quantized-zeros": (
        compressed(symmetric=False), partial(pack_quantized, symmetric=False), {},
    ),
    "pack-quantized-channel": (
        compressed(strategy="channel", group_size=None, symmetric=False),
        partial(pack_quantized, symmetric=False),
        {"group_size": None},
    ),
    "pack-quantized-8-bit": (
        compressed(num_bits=8),
        partial(pack_quantized, symmetric=True),
        {"symmetric": True, "bits": 8},
    ),
    "pack-quantized-actorder": (
        compressed(actorder="group"),
        partial(pack_quantized, symmetric=True, actorder=True),
        {"symmetric": True, "groups": scattered},
    ),
    "pack-quantized-ignore": (
        {**compressed(), "ignore": ["lm_head", "re:.*self_attn", "re:.*down_proj"]},
        partial(pack_quantized, symmetric=True),
        {"symmetric": True, "names": ("gate_proj", "up_proj")},
    ),
    "int-quantized": (
        compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
        int_quantized,
        {"symmetric": True, "bits": 8, "group_size": None},
    ),
}  # fmt: skip


def load(directory: Path, option: str | None = None, **fields: Any) -> CausalLM:
    """The model of a checkpoint, in float64."""
    stored = load_model_config(directory).quantization
    quantization = resolve_quantization(option, stored, device="cpu")
    kernels = cpu_kernels(torch.float64, quantization)
    return build(directory, torch.float64, kernels=kernels, **fields)


@pytest.mark.parametrize("case", CASES)
def test_a_stored_model_equals_its_float_weights(case: str, tmp_path: Path) -> None:
    config, pack, options = CASES[case]
    floats = write_quantized(tmp_path, "llama", config, pack, **options)
    option = "int8_weight_only" if case == "int-quantized" else None
    model, truth = load(tmp_path / "quantized", option), load(floats)
    expected = all_logits(truth, PROMPTS)
    found = all_logits(model, PROMPTS)
    assert (found - expected).abs().max() < 1e-5 * expected.std()
    quantized = [name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(quantized) == 2 * (1 if "names" in options and case != "gptq-head" else 4) + (
        case == "gptq-head"
    )
    method = model.get_submodule(quantized[0])
    assert method.bits == options.get("bits", 4)
    assert (method.zeros is not None) == (not options.get("symmetric"))
    assert (method.order is not None) == ("groups" in options)


@pytest.mark.parametrize("case", ["gptq-desc-act", "awq", "int-quantized"])
def test_stored_models_run_with_quantized_activations(case: str, tmp_path: Path) -> None:
    config, pack, options = CASES[case]
    floats = write_quantized(tmp_path, "llama", config, pack, **options)
    bits = options.get("bits", 4)
    expected = all_logits(load(floats), PROMPTS)
    found = all_logits(load(tmp_path / "quantized", f"int{bits}"), PROMPTS)
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


@pytest.mark.parametrize("case", ["gptq", "pack-quantized-zeros"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_part(case: str, rank: int, tmp_path: Path) -> None:
    config, pack, options = CASES[case]
    write_quantized(tmp_path, "llama", config, pack, intermediate_size=128, **options)
    whole = load(tmp_path / "quantized").model.layers[1]
    part = load(tmp_path / "quantized", shard=Shard(rank, 2)).model.layers[1]
    rows = slice(64 * rank, 64 * rank + 64)
    down, cut = whole.mlp.down_proj.method, part.mlp.down_proj.method
    assert torch.equal(cut.scales, down.scales[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(cut.values, down.values[:, 32 * rank : 32 * rank + 32])
    gate_up, cut = whole.mlp.gate_up_proj.method, part.mlp.gate_up_proj.method
    for name in ("values", "scales", "zeros"):
        both = getattr(gate_up, name).view(2, 128, -1)[:, rows].flatten(0, 1)
        assert torch.equal(getattr(cut, name), both)


def test_biases_stay_beside_quantized_matrices(tmp_path: Path) -> None:
    """Of the model's own, and the zeros that GPTQ writers add to layers without one."""
    floats = write_quantized(tmp_path, "qwen2", GPTQ, gptq)
    expected = all_logits(load(floats), PROMPTS)
    quantized = tmp_path / "quantized"
    assert (all_logits(load(quantized), PROMPTS) - expected).abs().max() < 1e-5 * expected.std()
    file = quantized / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(stored | {name: torch.zeros(64)}, file)
    assert (all_logits(load(quantized), PROMPTS) - expected).abs().max() < 1e-5 * expected.std()
    save_file(stored | {name: torch.ones(64)}, file)
    with pytest.raises(WeightLoadError, match=r"0\.mlp\.down_proj: .* bias that is not 0"):
        load(quantized)


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
        rf"{DOWN}: g_idx does not make 3 groups of 32 inputs",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_match_are_named(case: str, tmp_path: Path) -> None:
    name, change, message = BROKEN[case]
    config, pack, options = CASES[name]
    write_quantized(tmp_path, "llama", config, pack, **options)
    edit(tmp_path / "quantized", change)
    with pytest.raises(WeightLoadError, match=message):
        load(tmp_path / "quantized")


def test_gptq_may_do_without_g_idx(tmp_path: Path) -> None:
    floats = write_quantized(tmp_path, "llama", GPTQ, gptq)
    edit(tmp_path / "quantized", lambda t: [t.pop(n) for n in list(t) if n.endswith("g_idx")])
    expected = all_logits(load(floats), PROMPTS)
    found = all_logits(load(tmp_path / "quantized"), PROMPTS)
    assert (found - expected).abs().max() < 1e-5 * expected.std()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_from_the_low_bits(bits: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (3, 64))
    words = fill_words(values, bits)
    assert (words < 0).any(), "the sign bit is a value's bit like any other"
    assert torch.equal(unpack_words(words, bits), torch.from_numpy(values).int())


# --- configs --------------------------------------------------------------------------------------


def test_configs_are_read() -> None:
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
    w8a8 = parse(compressed("int-quantized", num_bits=8, strategy="channel", group_size=None))
    assert (w8a8.activations, w8a8.bits, w8a8.group_size) == ("int8", 8, None)
    ignoring = parse({**compressed(), "ignore": ["re:.*mlp\\.", "model.layers.1.self_attn.o_proj"]})
    held = {
        name: ignoring.of(f"model.layers.{name}") is not None
        for name in ("1.mlp.gate_up_proj", "1.mlp.down_proj", "1.self_attn.o_proj",
                     "11.self_attn.o_proj", "1.self_attn.qkv_proj")
    }  # fmt: skip
    assert list(held.values()) == [False, False, False, True, True]
    assert ignoring.of("lm_head")
    some = parse({**compressed(), "ignore": ["model.layers.1.self_attn.q_proj"]})
    assert some.of("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(UnsupportedModelError, match=r"only some of .*1\.self_attn\.q_proj, "):
        some.of("model.layers.1.self_attn.qkv_proj")


def _group(**fields: Any) -> dict[str, Any]:
    raw = compressed()
    (group,) = raw["config_groups"].values()
    return {**raw, "config_groups": {"group_0": {**group, **fields}}}


REFUSED: dict[str, dict[str, Any]] = {
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
    "format='marlin-24'; supported: 'pack-quantized' or 'int-quantized'": compressed("marlin-24"),
    "weights.num_bits=2; supported: 4 or 8": compressed(num_bits=2),
    "weights.type='float'": compressed(type="float"),
    "weights.strategy='tensor'": compressed(strategy="tensor"),
    "input_activations={'num_bits': 8}": _group(input_activations={"num_bits": 8}),
    "kv_cache_scheme={'num_bits': 4": {**compressed(), "kv_cache_scheme": {"num_bits": 4}},
    "has 0 config_groups": {**compressed(), "config_groups": {}},
    "quant_method must be a string, got ['gptq']": {"quant_method": ["gptq"]},
    "bits must be an integer, got '4'": {**GPTQ, "bits": "4"},
    "group_size must be an integer, got [128]": {**GPTQ, "group_size": [128]},
    "version must be a string, got 5": {**AWQ, "version": 5},
    "modules_to_not_convert[0] must be a string": {**AWQ, "modules_to_not_convert": [5]},
    "config_groups must be a dict, got [5]": {**compressed(), "config_groups": [5]},
    "config_groups['group_0'] must be a dict": {**compressed(), "config_groups": {"group_0": 5}},
    "weights must be a dict, got 5": _group(weights=5),
    "num_bits must be an integer, got 4.0": compressed(num_bits=4.0),
    "symmetric must be True or False, got 1": compressed(symmetric=1),
    "ignore must be a list, got 're:.*'": {**compressed(), "ignore": "re:.*"},
    "'re:(', which is no expression": {**compressed(), "ignore": ["re:("]},
    "none of a group": {**compressed(), "ignore": ["re:(a+)+$"]},
    "up to 4 repeats": {**compressed(), "ignore": ["re:.*.*.*.*.*q_proj"]},
    "sparsity_config.format='sparse-24": {
        **compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_read_is_refused_by_name_and_value(message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_quantization(REFUSED[message], tied=False)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", PROJECTIONS),  # matrices of experts
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),  # merged, half heads turned
        ("ernie4_5", PROJECTIONS),  # neighbours turned
    ],
)
def test_families_with_other_matrices_are_read_too(
    family: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    floats = write_quantized(tmp_path, family, AWQ, awq, names=names)
    prompts = random_prompts(12, 3)
    expected = all_logits(build(floats, torch.float64), prompts)
    got = all_logits(load(tmp_path / "quantized"), prompts)
    assert (got - expected).abs().max() < 1e-9
