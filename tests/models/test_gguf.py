"""GGUF files of every architecture have the logits of transformers with the file's weights.

`tests/support/gguf_files.py` writes them as llama.cpp's converter does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nanoengine.checkpoint import gguf_tensors
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.families import gguf_families
from nanoengine.checkpoint.find import resolve_model
from nanoengine.checkpoint.gguf import read_gguf
from nanoengine.checkpoint.quantization import resolve_quantization
from nanoengine.cli.info import weight_sizes
from nanoengine.cli.main import main
from nanoengine.errors import ConfigError, ModelError, UnsupportedModelError, WeightLoadError
from nanoengine.jobs.manifest import describe_engine
from nanoengine.layers import quantized_formats
from nanoengine.runner.start import model_size
from nanoengine.settings.config import EngineConfig
from tests.support.checkpoints import DATA, MODELS
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.gguf_files import WRITER, make_gguf
from tests.support.model_helpers import (
    all_logits,
    build,
    cpu_kernels,
    random_prompts,
    transformers_logits,
)

PROMPTS = random_prompts(21, 1, 40)
CONFIGS = yaml.safe_load((DATA / "configs.yaml").read_text(encoding="utf-8"))
FULL = "full_attention"

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}

ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
"""All experts are used, so rounding cannot change the selection."""


CASES: dict[str, tuple[str, dict[str, Any]]] = MODELS["gguf"]
"""Name -> a family and the config changes that a GGUF file can represent."""

TYPES = [
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4",
]  # fmt: skip


def mixed(name: str) -> str:
    """The types of a Q4_K_M file, which differ between matrices that are fused into one GEMM."""
    if name.startswith(("token_embd", "output")) or name.endswith(("_v.weight", "ffn_down.weight")):
        return "Q6_K"
    return "Q4_K"


def partly(name: str) -> str:
    """A float matrix that is merged with quantized ones."""
    return "F16" if name.endswith(("attn_k.weight", "ffn_up.weight")) else "Q8_0"


def found_logits(path: Path, option: str | None = None, **fields: Any) -> torch.Tensor:
    config = load_model_config(path)
    quantization = resolve_quantization(option, config.quantization, device="cpu")
    kernels = cpu_kernels(torch.float32, quantization)
    return all_logits(build(path, kernels=kernels, **fields), PROMPTS)


def often(names: Iterable[str], *always: str) -> list[Any]:
    """Names as parameters. All except `always` run only if code for reading or quantization
    changes."""
    rarely = pytest.mark.guards("nanoengine/checkpoint/**/*.py", "nanoengine/layers/*.py")
    return [pytest.param(name, marks=() if name in always else rarely) for name in names]


@pytest.mark.parametrize("case", often(CASES, "llama", "qwen3", "gemma3", "phi3 longrope"))
def test_logits_of_every_architecture_match_transformers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, overrides = CASES[case]
    model = make_gguf(tmp_path / "m.gguf", family, **overrides)
    expected = transformers_logits(model, PROMPTS)
    # Why 64: longrope's factors depend on the engine's length, in transformers on the prompt's.
    fields = {"max_positions": 64} if case == "phi3 longrope" else {}
    assert (found_logits(tmp_path / "m.gguf", **fields) - expected).abs().max() < 2e-4
    assert "not read" not in caplog.text


def test_every_architecture_has_a_case() -> None:
    written = {
        overrides.get("architecture") or WRITER["architectures"].get(family, family)
        for family, overrides in CASES.values()
    }
    assert written == {name for family in gguf_families().values() for name in family.gguf}


@pytest.mark.parametrize("type", often(TYPES, "Q4_0"))
def test_every_type_with_float_activations(type: str, tmp_path: Path) -> None:
    model = make_gguf(tmp_path / "m.gguf", "llama", types=lambda name: type, **WIDE)
    found = found_logits(tmp_path / "m.gguf", "gguf_weight_only")
    assert (found - transformers_logits(model, PROMPTS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "scale", "options"),
    [
        ("mixtral", ".scale", {"sliding_window": None, "num_experts_per_tok": 4}),
        ("qwen2", ".weight.scale", {"joined": True}),
    ],
)
def test_nvfp4_matrices_are_multiplied_by_their_scales(
    family: str, scale: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"types": lambda name: "NVFP4", "scale": scale, **WIDE, **options}
    model = make_gguf(tmp_path / "m.gguf", family, **options)
    expected = transformers_logits(model, PROMPTS)
    found = found_logits(tmp_path / "m.gguf", "gguf_weight_only")
    assert (found - expected).abs().max() < 1e-4
    rounded = found_logits(tmp_path / "m.gguf")
    assert 1e-4 < (rounded - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_scales_of_other_tensors_are_unexpected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "m.gguf", "llama", types=lambda name: "NVFP4", scale=".scale", **WIDE)
    file, name = read_gguf(tmp_path / "m.gguf"), "blk.0.ffn_up.scale"
    wrong = {name: file.tensors[name]._replace(shape=(2,))}
    wrong["output_norm.scale"] = file.tensors[name]
    changed = file._replace(tensors=file.tensors | wrong)
    monkeypatch.setattr(gguf_tensors, "read_gguf", lambda path, keep: changed)
    unexpected = r"unexpected: model\.layers\.0\.mlp\.up_proj\.scale, model\.norm\.scale"
    with pytest.raises(WeightLoadError, match=unexpected):
        build(tmp_path / "m.gguf")


@pytest.mark.parametrize("other", ["IQ1_S", "NVFP4"])
def test_info_counts_types_as_they_are_packed(other: str, tmp_path: Path) -> None:
    found, shown = [], []
    for type in ("Q8_0", other):
        path = tmp_path / f"{type}.gguf"
        make_gguf(path, "llama", types=lambda name, type=type: type, **WIDE)
        config = load_model_config(path)
        quantization = resolve_quantization(None, config.quantization, device="cpu")
        model = build(path, kernels=cpu_kernels(torch.float32, quantization))
        found.append(model_size(model)[1])
        shown.append(weight_sizes(config, path, torch.float32, quantization).total())
    assert found[0] - found[1] == pytest.approx(shown[0] - shown[1], rel=0.15)


NEXT_32 = {
    "shared_expert_intermediate_size": 32, "linear_value_head_dim": 16, "num_experts_per_tok": 8,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", FULL],
}  # fmt: skip
"""Rows are whole blocks. All experts are used, so rounding cannot change the selection. There is
one layer of each kind, because each layer adds rounding errors."""
QUANTIZED: dict[str, tuple[str | Callable[[str], str], dict[str, Any]]] = {
    "llama": (mixed, {**WIDE, "tie_word_embeddings": True, "attention_bias": False}),
    "qwen2": (partly, {}),
    "gpt_oss": (lambda name: "MXFP4" if "exps" in name else "Q8_0", {}),
    "gemma3": ("Q4_0", {}),
    "phi3": ("Q5_1", {}),
    "lfm2_moe": ("Q4_0", {}),
    **dict.fromkeys(("granite", "lfm2", "qwen3_moe", "qwen3_5", "one tensor"), ("Q8_0", {})),
    **dict.fromkeys(("qwen3_next", "qwen3_next one tensor"), ("Q8_0", NEXT_32)),
    "granitehybrid": ("Q8_0", {"num_experts_per_tok": 8}),
    "falcon_h1": ("Q8_0", {}),
    "nemotron_h": ("Q8_0", {"keys": None}),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3 older"), ("Q8_0", ALL_EXPERTS)),
    "gemma4": ("Q8_0", {}),
    "gemma4_moe": (
        lambda name: "NVFP4" if "ffn_down_exps" in name else "Q8_0",
        {"top_k_experts": 6, "moe_intermediate_size": 64},
    ),
    "apertus": (partly, {"tie_word_embeddings": True}),
    "nemotron": ("Q4_0", {}),
    "laguna": ("Q8_0", {"shared_expert_intermediate_size": 64, "num_experts_per_tok": 8}),
}
"""Case -> the types of its matrices, and changed config keys."""


@pytest.mark.parametrize("case", often(QUANTIZED, "llama", "gpt_oss"))
def test_files_with_several_types_match_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_formats, "ROWS_AT_ONCE", 48)
    (family, overrides), (types, changes) = CASES[case], QUANTIZED[case]
    each = types if callable(types) else lambda name: types
    model = make_gguf(tmp_path / "m.gguf", family, types=each, **{**overrides, **changes})
    expected = transformers_logits(model, PROMPTS)
    found = found_logits(tmp_path / "m.gguf", "gguf_weight_only")
    assert (found - expected).abs().max() < 2e-4
    # int8 activations differ by 1/254 of a row's maximum, which adds up to a few per cent.
    rounded = found_logits(tmp_path / "m.gguf")
    assert 1e-4 < (rounded - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_16_bit_floats_load_as_an_unquantized_checkpoint(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    model = make_gguf(tmp_path / "m.gguf", "qwen3", types=lambda name: kind)
    config = load_model_config(tmp_path / "m.gguf")
    assert (config.dtype, config.quantization) == (dtype, None)
    expected = transformers_logits(model, PROMPTS)
    assert (found_logits(tmp_path / "m.gguf") - expected).abs().max() < 1e-4
    rounded = found_logits(tmp_path / "m.gguf", "int8")
    assert 1e-4 < (rounded - expected).abs().mean() < 0.1


def test_an_engine_accepts_the_file_and_its_folder(tmp_path: Path) -> None:
    model = make_gguf(tmp_path / "m.gguf", "llama", types=lambda name: "Q8_0")
    (tmp_path / "m.gguf").rename(tmp_path / "m" / "m.gguf")
    (tmp_path / "m" / "config.json").unlink()
    expected = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )[0, len(PROMPTS[0]) :].tolist()
    for name, backend in ((tmp_path / "m" / "m.gguf", "auto"), (tmp_path / "m", "naive")):
        options = {"attention_backend": backend, "quantization": "gguf_weight_only"}
        engine = make_engine(str(name), dtype="float32", **options)
        assert tokens(run(engine, [PROMPTS[0]], greedy(8))) == [[expected]]
        assert engine.info.quantization == "Q8_0 weights (stored as gguf), float activations"


# --- metadata -------------------------------------------------------------------------------------


def config_with(tmp_path: Path, family: str = "llama", **keys: Any) -> Any:
    make_gguf(tmp_path / "m.gguf", family, keys={k.replace("__", "."): v for k, v in keys.items()})
    return load_model_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(("family", "keys", "message"), CONFIGS["gguf"])
def test_unsupported_metadata_raises(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_with(tmp_path, family, **keys)


def test_ssm_sizes_of_dense_granite_4_are_ignored(tmp_path: Path) -> None:
    sizes = {"ssm__state_size": 128, "ssm__group_count": 1, "ssm__time_step_rank": 8}
    sizes |= {"ssm__inner_size": 128, "ssm__conv_kernel": 4}
    found = config_with(tmp_path, "granite", expert_shared_feed_forward_length=96, **sizes)
    assert found == config_with(tmp_path, "granite")


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {"attention.head_count_kv": 4}, "attn_qkv.weight' has 128 rows;.* 192"),
        ("qwen3_next", {"ssm.time_step_rank": 8}, "ssm_ba.weight' has 8 rows;.* 16"),
        ("qwen3_next", {"ssm.inner_size": 64}, "ssm_in.weight' has 256 rows;.* 192"),
    ],
)
def test_a_fused_tensor_of_another_size_raises(
    family: str, keys: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    make_gguf(tmp_path / "m.gguf", family, joined=True, keys=keys)
    with pytest.raises(WeightLoadError, match=expected):
        load_model_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_rank_reads_its_rows_of_a_fused_tensor(kind: str, tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", "llama", joined=True, types=lambda name: kind)
    name = "model.layers.0.self_attn.k_proj.weight"
    ((_, whole),) = gguf_tensors.read_entries(tmp_path / "m.gguf", {name: ()})
    rows = (slice(16, 32), slice(None))
    ((_, part),) = gguf_tensors.read_entries(tmp_path / "m.gguf", {name: rows})
    assert len(whole) == 32
    assert torch.equal(part, whole[16:])


@pytest.mark.parametrize("layer", ["}", "{}", "{0.x}"])
def test_braces_in_a_tensor_name_are_not_a_layer_index(
    layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "m.gguf", "mixtral", sliding_window=None)
    file = read_gguf(tmp_path / "m.gguf")
    tensors = {name.replace("blk.1.", f"blk.{layer}."): it for name, it in file.tensors.items()}
    renamed = file._replace(tensors=tensors)
    monkeypatch.setattr(gguf_tensors, "read_gguf", lambda path, keep: renamed)
    with pytest.raises(WeightLoadError, match=r"missing: model\.layers\.1\."):
        build(tmp_path / "m.gguf")


WRONG_VALUES = [
    0, 1, -1, 7, 2**31, -(2**40), 1e300, float("nan"), 0.5, "", "x", True, [], [1], [0, 0], ["a"],
    np.array([1, 2, 3], "u4"), np.array([], "f4"), np.array([0, 0, 0], "i4"),
    np.array([2**63], "u8"),
]  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3_5",
        "lfm2",
        "qwen3_next",
        "glm4_moe",
        "ministral3",
        "deepseek_v3",
        "gemma4",
        "granite_hybrid",
        "nemotron_h",
        "hy_v3",
        "laguna",
        "apertus",
    ],
)
def test_wrong_metadata_values_raise_model_errors(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "m.gguf", family)
    file, random = read_gguf(tmp_path / "m.gguf"), Random(0)
    extra = ["rope.scaling.type", "rope.scaling.factor", "attention.sliding_window"]
    extra += ["nextn_predict_layers", "expert_count", "attention.causal", "full_attention_interval"]
    keys = [*file.metadata, *(f"{file.metadata['general.architecture']}.{key}" for key in extra)]
    keys += [f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "eos_token_id")]
    keys += ["general.type", "general.sampling.top_k"]
    num_errors = 0
    for key in keys:
        for value in random.sample(WRONG_VALUES, 6):
            changed = file._replace(metadata=file.metadata | {key: value})
            monkeypatch.setattr(gguf_tensors, "read_gguf", lambda path, keep, new=changed: new)
            try:
                load_model_config(tmp_path / "m.gguf")
            except ModelError:
                num_errors += 1
    assert num_errors > len(keys)


def test_keys_with_neutral_values_have_no_effect(tmp_path: Path) -> None:
    config = config_with(tmp_path, expert_count=0, pooling_type=0, rope__scaling__type="none")
    assert config == config_with(tmp_path)
    assert config.architecture == "LlamaForCausalLM"


def test_linear_and_yarn_rope_scaling_is_parsed(tmp_path: Path) -> None:
    scaled = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128}
    (rope, *_) = config_with(tmp_path, rope__scaling__type="linear", **scaled).ropes
    assert (rope.type, rope.factor) == ("linear", 4)
    (rope, *_) = config_with(tmp_path, rope__scaling__type="yarn", **scaled).ropes
    assert (rope.type, rope.original_max_position_embeddings, rope.truncate) == ("yarn", 128, True)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_sliding_window_layers_have_the_default_rope_base(tmp_path: Path) -> None:
    config = config_with(tmp_path, "gemma3", rope__freq_base=5e5, rope__freq_base_swa=None)
    assert {rope.theta for rope in config.ropes} == {1e4}  # all three have a window
    config = config_with(tmp_path, "gemma3", rope__freq_base=5e5, attention__sliding_window=None)
    assert {rope.theta for rope in config.ropes} == {5e5}


def test_a_file_without_a_sliding_window_ignores_the_class_default(tmp_path: Path) -> None:
    config = config_with(tmp_path, "exaone4", attention__sliding_window=None)
    assert set(config.sliding_windows) == {None}
    assert None not in config.ropes  # EXAONE 4 applies RoPE to all layers where none has a window


def test_end_tokens_and_sampling_defaults_are_read_from_metadata(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(256)]
    words[7], words[8], words[9] = "<|im_end|>", "<|end|>", "<|eot_id|>"
    kinds = [1] * 256
    kinds[7] = kinds[8] = 3
    keys = {"tokenizer__ggml__tokens": words, "tokenizer__ggml__token_type": kinds}
    keys |= {"tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__eot_token_id": 7}
    config = config_with(tmp_path, general__sampling__temp=0.5, general__sampling__top_k=9, **keys)
    assert config.eos_token_ids == (2, 7, 8)  # token 9 is normal text
    assert config.generation_defaults == {"temperature": 0.5, "top_k": 9}
    words[10], words[11] = "<|return|>", "<|call|>"
    kinds[10] = kinds[11] = 3
    config = config_with(tmp_path, **keys)
    assert config.eos_token_ids == (2, 7, 10, 11)


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    config = config_with(tmp_path, family="qwen3", nextn_predict_layers=1)
    assert (config.num_hidden_layers, config.ignored_tensors) == (1, r"model\.layers\.(1)\.")
    assert len(build(tmp_path / "m.gguf").model.layers) == 1


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    config_with(tmp_path)
    config = load_model_config(tmp_path / "m.gguf")
    from nanoengine.models.loader import load_model
    from tests.support.model_helpers import make_context

    deeper = replace(config, num_hidden_layers=3, ropes=config.ropes * 2,
                   sliding_windows=(None,) * 3)  # fmt: skip
    with pytest.raises(WeightLoadError, match=r"missing: model\.layers\.2\."):
        load_model(deeper, tmp_path / "m.gguf", context=make_context())


# --- options and file locations -------------------------------------------------------------------


def test_quantization_options_of_gguf_files(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", "llama", types=lambda name: "Q4_0")
    stored = load_model_config(tmp_path / "m.gguf").quantization
    assert (stored.format, stored.bits) == ("gguf", 4)
    plain = resolve_quantization(None, stored, device="cpu")
    assert plain == resolve_quantization("gguf", stored, device="cpu")
    assert plain.activations == "int8"
    assert str(plain) == "Q4_0 weights (stored as gguf), int8 activations"
    exact = resolve_quantization("gguf_weight_only", stored, device="cpu")
    assert exact.activations == "float"
    for option in ("int8", "int4_weight_only"):
        with pytest.raises(ConfigError, match=r"already quantized in Q4_0.*gguf_weight_only"):
            resolve_quantization(option, stored, device="cpu")
    with pytest.raises(ConfigError, match="stored as gguf"):
        resolve_quantization("awq", stored, device="cpu")
    with pytest.raises(ConfigError, match="stored as floats"):
        resolve_quantization("gguf", None, device="cpu")
    assert resolve_quantization(None, stored, device="cuda") is None, "dequantized while loading"


def test_a_job_manifest_identifies_the_file(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", "llama")
    config = EngineConfig(model=str(tmp_path / "m.gguf"))
    before = describe_engine(config, "m")["model"]["files"]
    assert list(before) == ["m.gguf"]
    make_gguf(tmp_path / "m.gguf", "llama", seed=1)
    assert describe_engine(config, "m")["model"]["files"] != before


def test_info_lists_the_stored_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_gguf(tmp_path / "m.gguf", "qwen3_moe", mlp_only_layers=[],
              types=lambda name: "Q4_0" if "exps" in name else "Q8_0")  # fmt: skip
    main(["info", str(tmp_path / "m.gguf"), "--all"])
    out = capsys.readouterr().out
    assert " experts: 0.00 GiB of Q4_0\n" in out
    assert " embedding: 0.00 GiB of Q8_0\n" in out
    assert "Q4_0, Q8_0 weights (stored as gguf), int8 activations" in out
    assert "stored: mean KL of 0.0008 to 0.0036 to the same weights in float32" in out


def test_files_in_folders_of_other_programs_are_found(tmp_path: Path) -> None:
    """LM Studio's publisher/model/file, ollama's blobs, a repository in the Hugging Face cache."""

    def found(path: Path) -> Path:
        return resolve_model(EngineConfig(model=str(path)))

    file = tmp_path / "models" / "publisher" / "a-GGUF" / "a-Q8_0.gguf"
    file.parent.mkdir(parents=True)
    make_gguf(tmp_path / "a.gguf", "llama")
    (tmp_path / "a.gguf").rename(file)
    assert found(file.parent) == file
    for above in (tmp_path / "models", tmp_path / "models" / "publisher"):
        with pytest.raises(ConfigError, match=f"; models in its subfolders: {file}"):
            found(above)
    blob = tmp_path / "ollama" / "blobs" / "sha256-1f00"
    blob.parent.mkdir(parents=True)
    file.rename(blob)
    assert found(blob) == found(blob.parent) == blob
    with pytest.raises(ConfigError, match=f"; models in its subfolders: {blob.parent}"):
        found(tmp_path / "ollama")
    repository = tmp_path / "hub" / "models--me--a"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "a.gguf").symlink_to(blob)
    with pytest.raises(ConfigError, match=f"; models in its subfolders: {snapshot / 'a.gguf'}"):
        found(repository)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee\n")
    assert found(repository) == found(snapshot) == snapshot / "a.gguf"
    with pytest.raises(ConfigError, match=f"; models in its subfolders: {repository}"):
        found(tmp_path / "hub")


@pytest.mark.parametrize(
    ("model", "similar"),
    [
        ("Tiny-Q8_O.gguf", "Tiny-Q8_0.gguf"),
        ("tiny-q8_0.gguf", "Tiny-Q8_0.gguf"),
        ("tiny", "Tiny-Q8_0.gguf"),
        ("lama/config.json", "llama"),
        ("wholly other", ""),
    ],
)
def test_a_missing_path_raises_with_a_similar_name(
    model: str, similar: str, tmp_path: Path
) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "Tiny-Q8_0.gguf").touch()
    end = f"; did you mean {tmp_path / similar}?" if similar else ""
    with pytest.raises(ConfigError) as error:
        resolve_model(EngineConfig(model=str(tmp_path / model)))
    assert str(error.value).endswith(f"{str(tmp_path / model)!r} does not exist{end}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context_length": 0}, "llama.context_length must be from 1"),
        ({"attention.head_count_kv": 3}, "llama.attention.head_count_kv=3"),
        ({"rope.freq_base": 0.5}, "llama.rope.freq_base must be from 1.001"),
        ({"general.sampling.temp": -1.0}, "general.sampling.temp: "),
    ],
)
def test_messages_use_the_keys_of_the_file(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    make_gguf(path, "llama", keys=keys)
    with pytest.raises(UnsupportedModelError) as error:
        load_model_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "config.json" not in str(error.value)


FILES = [
    "README.md", "a-Q4_K_M.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf",
    "a-IQ4_XS.gguf", "a-UD-IQ4_XS.gguf", "mmproj-a-Q8_0.gguf", "BF16/a-BF16.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("me/a:Q4_K_M", ["a-Q4_K_M.gguf"]),
        ("me/a:q8_0", ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]),
        ("me/a/a-IQ4_XS.gguf", ["a-IQ4_XS.gguf"]),
        ("me/a/BF16/a-BF16.gguf", ["BF16/a-BF16.gguf"]),
        ("me/a:UD-IQ4_XS", ["a-UD-IQ4_XS.gguf"]),
    ],
)
def test_a_hub_file_is_selected_by_type_or_path(
    model: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = mock_hub(tmp_path, monkeypatch, FILES)
    assert resolve_model(EngineConfig(model=model, revision="r")) == tmp_path / files[0]
    assert downloads == [("me/a", "r", files)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "me/a:IQ4_XS",
            "matches 2 GGUF files of me/a.*repository: BF16/a-BF16.gguf, a-IQ4_XS.gguf",
        ),
        ("me/a:Q5_K", "matches no GGUF files"),
        ("me/a", "matches 5 GGUF files of me/a; it must match one, for example me/a:Q4_K_M"),
        ("me/a/b.gguf", "matches no GGUF files"),
        ("./me/a.gguf", "model file './me/a.gguf' does not exist"),
        ("~no such user/a", "model directory '~no such user/a' does not exist"),
        ("a" * 5000, "model directory 'a+' does not exist"),
    ],
)
def test_ambiguous_hub_names_raise(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock_hub(tmp_path, monkeypatch, FILES)
    with pytest.raises(ConfigError, match=message):
        resolve_model(EngineConfig(model=model))


def mock_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> list[tuple[str, str | None, list[str]]]:
    """A fake hub with one repository; records the downloaded files."""
    import huggingface_hub

    downloads: list[tuple[str, str | None, list[str]]] = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        downloads.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, name, revision: files
    )
    return downloads
