"""Checkpoints of 8-bit and 4-bit floats against the same weights as floats, and every stored form
expanded while it loads.

The writers are formulas of their own, block by block. Sources: transformers' `Fp8Quantize`,
compressed-tensors' `quantize` and `pack_fp4_to_uint8`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from nanoengine import build as build_module
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import StoredQuantization, resolve_quantization
from nanoengine.checkpoint.quantization_parsers import parse_quantization
from nanoengine.errors import ConfigError, UnsupportedModelError, WeightLoadError
from nanoengine.kernels.code_tables import E2M1
from nanoengine.layers.collectives import Shard
from nanoengine.layers.cpu_quantized import CPUWeightOnlyLinear
from nanoengine.layers.expanded import expanded_linears
from nanoengine.layers.kernels import Kernels, UnquantizedLinear
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_weight import QuantizedWeight
from nanoengine.models.decoder import CausalLM
from tests.layers.test_quantized_formats import CASES as WHOLE_NUMBERS
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.model_helpers import (
    DenseAttention,
    all_logits,
    build,
    cpu_kernels,
    random_prompts,
)
from tests.support.quantized_checkpoints import PROJECTIONS, Tensors, write_quantized

PROMPTS = random_prompts(9, 3)
SIZES = {"hidden_size": 160, "intermediate_size": 192, "head_dim": 40}
"""No multiples of 128: blocks at the ends are smaller, and cut the rows of q, k and v."""
MATRICES = (*PROJECTIONS, "qkv_proj", "gate_up_proj")
BYTE, HALF = torch.float8_e4m3fn, torch.tensor(E2M1) / 2

Packed = tuple[Tensors, torch.Tensor]


# --- writers --------------------------------------------------------------------------------------


def blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """e4m3 codes, a scale for each block [ceil(N / rows), ceil(K / columns)], and the numbers."""
    codes, numbers = torch.empty_like(weight, dtype=BYTE), torch.empty_like(weight)
    starts = range(0, len(weight), rows), range(0, weight.shape[1], columns)
    scales = torch.empty(len(starts[0]), len(starts[1]))
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            place = slice(row, row + rows), slice(column, column + columns)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(BYTE)
            numbers[place] = codes[place].float() * scales[i, j]
    return codes, scales, numbers


def fp8(weight: torch.Tensor, *, name: str = "weight_scale_inv") -> Packed:
    codes, scales, numbers = blocks(weight, 128, 128)
    return {"weight": codes, name: scales}, numbers


def fp8_matrix(weight: torch.Tensor, *, names: tuple[str, str]) -> Packed:
    codes, scales, numbers = blocks(weight, *weight.shape)
    scale, of_inputs = names
    shape = (1,) if of_inputs == "input_scale_of_one" else ()
    of_inputs = of_inputs.removesuffix("_of_one")
    return {"weight": codes, scale: scales.view(shape), of_inputs: torch.ones(shape)}, numbers


def fp8_rows(weight: torch.Tensor, *, columns: int | None = None) -> Packed:
    codes, scales, numbers = blocks(weight, 1, columns or weight.shape[1])
    return {"weight": codes, "weight_scale": scales}, numbers


def nvfp4(weight: torch.Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 16))
    whole = 448 * 6 / weight.abs().max()
    scales = (groups.abs().amax(2) / 6 * whole).to(BYTE)
    steps = (scales.float() / whole).unsqueeze(2)
    codes = ((groups / steps).unsqueeze(3) - HALF).abs().argmin(3).flatten(1)
    numbers = (HALF[codes].unflatten(1, (-1, 16)) * steps).flatten(1)
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": whole.view(1),
        "input_global_scale": torch.ones(1),
    }
    return tensors, numbers


def group(weights: dict[str, Any], targets: tuple[str, ...] = ("Linear",), **more: Any) -> Any:
    given = {"type": "float", "symmetric": True, "dynamic": False, "num_bits": 8, **weights}
    inputs = {"type": "float", "num_bits": given["num_bits"], "dynamic": True}
    return {"targets": list(targets), "weights": given, "input_activations": inputs, **more}


def compressed(*groups: dict[str, Any], layout: str = "float-quantized") -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": one for i, one in enumerate(groups)},
    }  # fmt: skip


FP8: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
}  # fmt: skip
OF_MATRIX = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
FOUR = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
SKIPPED = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn"]
MIXED = compressed(
    group({"strategy": "channel"}, ("re:.*self_attn", "re:.*down_proj"), format="float-quantized"),
    group(FOUR, ("re:.*(gate|up)_proj",), format="nvfp4-pack-quantized"),
    layout="mixed-precision",
)

Pack = Callable[[torch.Tensor], Packed]
CASES: dict[str, tuple[dict[str, Any], Pack | dict[str, Pack], str]] = {
    "fp8": (FP8, fp8, "fp8"),
    "fp8-matrix": (
        OF_MATRIX, partial(fp8_matrix, names=("weight_scale_inv", "activation_scale")), "fp8",
    ),
    "fp8-older": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(fp8_matrix, names=("weight_scale", "input_scale")), "fp8",
    ),
    "fp8-some": ({**FP8, "modules_to_not_convert": SKIPPED}, fp8, "fp8"),
    "tensor": (
        compressed(group({"strategy": "tensor"})),
        partial(fp8_matrix, names=("weight_scale", "input_scale_of_one")), "fp8",
    ),
    "channel": (compressed(group({"strategy": "channel"})), fp8_rows, "fp8"),
    "group": (
        compressed(group({"strategy": "group", "group_size": 32})), partial(fp8_rows, columns=32),
        "fp8",
    ),
    "block": (compressed(group(BLOCK)), partial(fp8, name="weight_scale"), "fp8"),
    "nvfp4": (compressed(group(FOUR), layout="nvfp4-pack-quantized"), nvfp4, "fp4"),
    "mixed": (
        MIXED, {name: nvfp4 if name in ("gate_proj", "up_proj") else fp8_rows
                for name in PROJECTIONS}, "fp4, fp8",
    ),
}  # fmt: skip


def write(directory: Path, case: str, family: str = "llama", **overrides: Any) -> Path:
    """Writes `directory` / "stored", and the same numbers in `directory` / "floats"; returns the
    latter."""
    config, pack, _ = CASES[case]
    floats, quantized = directory / "floats", directory / "stored"
    make_checkpoint(floats, family, **{**SIZES, **overrides})
    truth, stored = load_file(floats / "model.safetensors"), Tensors()
    skipped = tuple(name + "." for name in config.get("modules_to_not_convert", ()))
    for name, tensor in truth.items():
        stem, _, kind = name.rpartition(".")
        last = stem.rpartition(".")[2]
        if kind != "weight" or last not in MATRICES or (skipped and name.startswith(skipped)):
            stored[name] = tensor
            continue
        tensors, truth[name] = (pack[last] if isinstance(pack, dict) else pack)(tensor)
        stored |= {f"{stem}.{part}": value for part, value in tensors.items()}
    save_file(truth, floats / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    raw = json.loads((floats / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(stored, quantized / "model.safetensors")
    return floats


def load(directory: Path, dtype: torch.dtype = torch.float64, **fields: Any) -> CausalLM:
    """As an engine on a CPU holds it."""
    stored = load_model_config(directory).quantization
    kernels = cpu_kernels(dtype, resolve_quantization(None, stored, device="cpu"))
    return build(directory, dtype, kernels=kernels, **fields)


def expanded(directory: Path, dtype: torch.dtype = torch.float64, **fields: Any) -> CausalLM:
    """As an engine holds it on a device that has no kernel for the stored form."""
    stored, kernels = load_model_config(directory).quantization, Kernels(DenseAttention())
    assert stored is not None and resolve_quantization(None, stored, device="cuda") is None
    kernels.linear = expanded_linears(stored, kernels.linear)
    return build(directory, dtype, kernels=kernels, **fields)


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_stored_model_equals_its_float_weights(case: str, tmp_path: Path) -> None:
    floats = write(tmp_path, case)
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    model = load(tmp_path / "stored")
    assert (all_logits(model, PROMPTS) - expected).abs().max() < 1e-9
    held = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(held) == (5 if case == "fp8-some" else 8)
    assert all(m.values.element_size() == 1 for m in held), "one byte a weight, or half a byte"
    assert (all_logits(expanded(tmp_path / "stored"), PROMPTS) - expected).abs().max() < 1e-12
    single = load(tmp_path / "stored", torch.float32)
    assert any(isinstance(m, CPUWeightOnlyLinear) for m in single.modules())
    assert (all_logits(single, PROMPTS) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("case", ["fp8", "mixed"])
def test_an_engine_generates_what_transformers_does(case: str, tmp_path: Path) -> None:
    floats = write(tmp_path, case)
    oracle = AutoModelForCausalLM.from_pretrained(floats).eval()
    prompts = torch.tensor(random_prompts(12, 12))
    plainly = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = oracle.generate(prompts, attention_mask=torch.ones_like(prompts), **plainly)
    for backend in ("cpu", "naive"):
        options = {"attention_backend": backend, "dtype": "float32"}
        engine = make_engine(str(tmp_path / "stored"), **options)
        found = tokens(run(engine, prompts.tolist(), greedy(8)))
        assert found == [[row] for row in expected[:, 12:].tolist()]
    formats = "fp8" if case == "fp8" else "float-quantized and nvfp4-pack-quantized"
    kind = CASES[case][2]
    assert engine.info.quantization == f"{kind} weights (stored as {formats}), float activations"
    named = "fp8" if case == "fp8" else "compressed-tensors"
    assert make_engine(str(tmp_path / "stored"), quantization=named).info.weight_bits == 8
    for option in ("int8", "int8_weight_only", "int4"):
        with pytest.raises(ConfigError, match=rf"contradicts .* {kind} \(.*leave the option out$"):
            make_engine(str(tmp_path / "stored"), quantization=option)


@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_an_engine_holds_floats_where_no_kernel_takes_the_stored_form(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, but that the device is this CPU."""
    on_gpu = partial(resolve_quantization, device="cuda")
    monkeypatch.setattr(build_module, "resolve_quantization", lambda *given, device: on_gpu(*given))
    floats, prompts = write(tmp_path, "mixed"), random_prompts(12, 5)
    options = {"attention_backend": backend, "dtype": "float32"}
    engine = make_engine(str(tmp_path / "stored"), **options)
    assert "stored in fp4, fp8 and held as torch.float32" in caplog.text
    assert (engine.info.quantization, engine.info.weight_bits) == (None, None)
    found = tokens(run(engine, prompts, greedy(8)))
    plain = make_engine(str(floats), **options)
    assert engine.info.weight_bytes == plain.info.weight_bytes
    assert found == tokens(run(plain, prompts, greedy(8)))


def test_blocks_are_those_of_transformers() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    tensors, numbers = fp8(weight)
    found = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"])
    assert torch.equal(found, numbers)


@pytest.mark.parametrize(("family", "case"), [("qwen3_moe", "fp8"), ("phi3", "fp8"),
                                              ("qwen3_moe", "nvfp4")])  # fmt: skip
def test_experts_and_merged_matrices_are_read_too(family: str, case: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 32} if family == "qwen3_moe" else {}
    floats = write(tmp_path, case, family, **sizes)
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    for make in (load, expanded):
        assert (all_logits(make(tmp_path / "stored"), PROMPTS) - expected).abs().max() < 1e-9
    single = load(tmp_path / "stored", torch.float32)
    assert (all_logits(single, PROMPTS) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_part(rank: int, tmp_path: Path) -> None:
    write(tmp_path, "fp8", intermediate_size=512, head_dim=64)
    for make, weight in ((load, values), (expanded, weights)):
        whole = make(tmp_path / "stored", torch.float64).model.layers[1].mlp
        shard = Shard(rank, 2)
        part = make(tmp_path / "stored", torch.float64, shard=shard).model.layers[1].mlp
        half = slice(256 * rank, 256 * rank + 256)
        assert torch.equal(weight(part.down_proj), weight(whole.down_proj)[:, half])
        both = weight(whole.gate_up_proj).view(2, 512, -1)[:, half].flatten(0, 1)
        assert torch.equal(weight(part.gate_up_proj), both)


def values(layer: Any) -> torch.Tensor:
    return layer.method.values


def weights(layer: Any) -> torch.Tensor:
    return layer.method.weight


def test_a_rank_of_expanded_weights_may_cut_through_a_group(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    whole = expanded(tmp_path / "stored").model.layers[0].mlp.down_proj
    part = expanded(tmp_path / "stored", shard=Shard(1, 2)).model.layers[0].mlp.down_proj
    assert torch.equal(weights(part), weights(whole)[:, 96:])
    with pytest.raises(WeightLoadError, match="cut through the quantized groups"):
        load(tmp_path / "stored", shard=Shard(1, 2))


@pytest.mark.parametrize("case", ["gptq-desc-act", "awq", "pack-quantized-zeros", "int-quantized"])
def test_whole_numbers_are_expanded_too(case: str, tmp_path: Path) -> None:
    config, pack, options = WHOLE_NUMBERS[case]
    floats = write_quantized(tmp_path, "llama", config, pack, **options)
    model = expanded(tmp_path / "quantized", torch.float32)
    assert all(
        type(m.method) is UnquantizedLinear for m in model.modules() if getattr(m, "method", None)
    )
    expected = all_logits(build(floats, torch.float64), PROMPTS)
    assert (all_logits(model, PROMPTS) - expected).abs().max() < 1e-4 * expected.std()


def test_dummy_weights_need_no_stored_form(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    for make in (load, expanded):
        model = make(tmp_path / "stored", torch.float32, load_format="dummy")
        assert all_logits(model, PROMPTS).isfinite().all()


# --- the kernel -----------------------------------------------------------------------------------


def weight_of(form: str) -> QuantizedWeight:
    """Every code there is, in a matrix with an incomplete panel of outputs."""
    generator = torch.Generator().manual_seed(1)
    codes, group_size = torch.randint(0, 256, (88, 192), generator=generator), 32
    scales = torch.rand(88, 6, generator=generator) + 0.5
    more: dict[str, Any] = {"bits": 4}
    if form == "e4m3":
        numbers = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.int8)
        more = {"bits": 8, "floats": True}
    elif form == "e2m1":
        numbers, more["table"] = torch.tensor(E2M1, dtype=torch.int8)[codes % 16], E2M1
    elif form == "int4":
        numbers = (codes % 16 - 8).to(torch.int8)
    else:
        numbers, more["bits"] = (codes - 128).to(torch.int8), 8
    zeros = torch.randint(-8, 8, (88, 6), generator=generator).float() if "zeros" in form else None
    return QuantizedWeight(
        values=numbers, scales=scales, zeros=zeros, group_size=group_size, **more
    )


@pytest.mark.parametrize("form", ["e4m3", "e2m1", "int4", "int8", "int8 with zeros"])
def test_the_kernel_widens_every_code_exactly(form: str) -> None:
    weight = weight_of(form)
    method = CPUWeightOnlyLinear("layer", bits=weight.bits, group_size=32, activations="float")
    method.create((88, 192), torch.float32, torch.device("cpu"))
    method.load_quantized(weight)
    assert torch.equal(method.apply(torch.eye(192), None).T, weight.dequantized())
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(2))
    whole = method.apply(x, None)
    torch.testing.assert_close(whole, x @ weight.dequantized().T, rtol=1e-4, atol=1e-3 * 448)
    for rows in (1, 2, 5, 33):
        assert torch.equal(method.apply(x[:rows], None), whole[:rows]), "other bits in a batch"


# --- refusals -------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "a weight that is no number": (
        "fp8", lambda t: t[f"{Q}.weight"].view(torch.uint8)[3, 5].fill_(0xFF),
        rf"{Q}: a weight is 0x7f or 0xff",
    ),
    "a scale that is no number": (
        "channel", lambda t: t[f"{Q}.weight_scale"][7].fill_(torch.inf), rf"{Q}: a scale is no",
    ),
    "a global scale of zero": (
        "nvfp4", lambda t: t[f"{Q}.weight_global_scale"].zero_(), rf"{Q}: a scale is no finite",
    ),
    "no scale": (
        "fp8-older", lambda t: t.pop(f"{Q}.weight_scale"), rf"{Q}: it has 0 of weight_scale_inv",
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
def test_tensors_that_do_not_match_are_named(case: str, tmp_path: Path) -> None:
    name, change, message = BROKEN[case]
    write(tmp_path, name)
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    for make in (load, expanded):
        with pytest.raises(WeightLoadError, match=message):
            make(tmp_path / "stored")


REFUSED: dict[str, dict[str, Any]] = {
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
        group({**FOUR, "group_size": 32}), layout="nvfp4-pack-quantized"
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
    "targets has 're:(', which is no expression": compressed(
        group({"strategy": "channel"}, ("re:(",))
    ),
    "kv_cache_scheme={'num_bits': 8, 'type': 'int'": {
        **compressed(group({"strategy": "channel"})),
        "kv_cache_scheme": {"num_bits": 8, "type": "int"},
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_read_is_refused_by_name_and_value(message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_quantization(REFUSED[message], tied=False)
    assert message in str(error.value)


def test_each_layer_has_one_scheme() -> None:
    layer = "model.layers.3"
    mixed = parse_quantization(MIXED, tied=False)
    schemes = {name: mixed.of(f"{layer}.{name}") for name in ("mlp.gate_up_proj", "mlp.down_proj")}
    assert [scheme and scheme.bits for scheme in schemes.values()] == [4, 8]
    assert mixed.of("lm_head") is None
    some = compressed(group({"strategy": "channel"}, ("re:.*self_attn", f"{layer}.mlp.gate_proj")))
    with pytest.raises(UnsupportedModelError, match=r"only some of .*3\.mlp\.gate_proj, "):
        parse_quantization(some, tied=False).of(f"{layer}.mlp.gate_up_proj")
    channel = group({"strategy": "channel"})
    both = parse_quantization(compressed(channel, channel), tied=False)
    with pytest.raises(UnsupportedModelError, match=r"2 config_groups for .*down_proj; supported"):
        both.of(f"{layer}.mlp.down_proj")


def test_a_scheme_of_the_cache_is_read() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "minmax"}
    raw = {**compressed(group({"strategy": "channel"})), "kv_cache_scheme": scheme}
    expected = StoredQuantization(
        format="float-quantized", bits=8, group_size=None, symmetric=True, activations="e4m3"
    )
    floats = compressed({**group({"strategy": "channel"}), "input_activations": None})
    assert parse_quantization(floats, tied=False).activations == "float"
    assert parse_quantization(raw, tied=True).of("model.layers.0.mlp.down_proj") is not None
    assert parse_quantization({**raw, "ignore": []}, tied=False) == expected


def test_modules_that_are_not_converted_end_at_a_name() -> None:
    names = ["lm_head", "model.layers.1", "mlp.gate", "model.layers.*.o_proj"]
    stored = parse_quantization({**FP8, "modules_to_not_convert": names}, tied=False)
    held = ("model.layers.11.mlp.down_proj", "model.layers.2.mlp.gate_proj")
    assert all(stored.of(name) for name in held)
    for name in ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.2.mlp.gate",
                 "model.layers.2.self_attn.o_proj"):  # fmt: skip
        assert stored.of(name) is None
