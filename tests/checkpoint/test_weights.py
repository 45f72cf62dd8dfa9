"""Weights: supported layouts of checkpoints, and errors for invalid checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.checkpoint import files, weights
from nanoengine.checkpoint.config import load_model_config
from nanoengine.errors import ConfigError, ModelError, WeightLoadError
from nanoengine.layers.collectives import Shard
from nanoengine.layers.kernels import Kernels, LinearMethod, UnquantizedLinear
from nanoengine.layers.packed import PackedLinear
from nanoengine.models import loader
from nanoengine.models.decoder import CausalLM
from nanoengine.models.loader import weight_slots
from tests.support.checkpoints import make_checkpoint
from tests.support.model_helpers import (
    DenseAttention,
    all_logits,
    build,
    make_context,
    random_prompts,
)

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
PROMPTS = random_prompts(11, 4)
Q_PROJ, O_PROJ = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qo")


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrites the single file of a checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "qwen3_moe")
    make_checkpoint(tmp_path / "many", "qwen3_moe", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one, many = (all_logits(build(tmp_path / d), PROMPTS) for d in ("one", "many"))
    assert torch.equal(one, many)


def test_a_tied_checkpoint_may_include_the_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    without = build(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert without.lm_head.method.weight is without.model.embed_tokens.weight

    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, add_head)
    assert torch.equal(all_logits(build(tmp_path), PROMPTS), all_logits(without, PROMPTS))


@pytest.mark.parametrize("at", [0, -1])
def test_a_tied_head_that_differs_from_the_embedding_is_rejected(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown which of the two tensors is right, and they give different tokens."""
    monkeypatch.setattr(weights, "ROWS_COMPARED", 100)
    make_checkpoint(tmp_path, "qwen3")

    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][at, at] += 1

    edit(tmp_path, add_head)
    with pytest.raises(WeightLoadError, match=r"tie_word_embeddings=True, but lm_head.*differs"):
        build(tmp_path)


def test_an_untied_checkpoint_without_a_head_is_rejected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightLoadError, match=r"missing: lm_head\.weight$"):
        build(tmp_path)


def test_experts_may_be_stacked_or_separate_tensors(tmp_path: Path) -> None:
    separate, stacked = tmp_path / "one", tmp_path / "stacked"
    make_checkpoint(separate, "qwen3_moe")
    make_checkpoint(stacked, "qwen3_moe", fused_experts=True)
    names = [load_file(d / "model.safetensors").keys() for d in (separate, stacked)]
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
    for shard in (Shard(0, 1), Shard(1, 2)):
        first, second = (
            dict(build(d, shard=shard).named_parameters()) for d in (separate, stacked)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_models_dtype(stored: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", dtype=stored)
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model = build(tmp_path, dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        loaded = model.model.layers[0].self_attn.qkv_proj.method.weight[:64]
        assert torch.equal(loaded, tensors[Q_PROJ].to(dtype))


def test_fused_matrices_have_their_parts_in_order(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    layer = build(tmp_path).model.layers[1]
    for fused, parts in (
        (layer.self_attn.qkv_proj, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        names = [f"model.layers.1.{part}" for part in parts]
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        assert torch.equal(fused.method.weight, weight)
        if fused.bias is not None:
            assert torch.equal(fused.bias, torch.cat([tensors[f"{name}.bias"] for name in names]))


BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(Q_PROJ), rf"missing: {Q_PROJ}$"),
    "unexpected": (
        lambda t: t.update({"model.extra.weight": torch.zeros(1)}),
        r"unexpected: model\.extra\.weight$",
    ),
    "mis-shaped": (
        lambda t: t.update({O_PROJ: torch.zeros(3, 5)}),
        rf"mis-shaped: {O_PROJ} \[3, 5\], expected \[64, 64\]$",
    ),
    "mis-typed": (
        lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}),
        rf"{Q_PROJ} in .* is torch\.int8, not floating point",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_tensor_that_does_not_match_is_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, change)
    with pytest.raises(WeightLoadError, match=message):
        build(tmp_path)


def test_at_most_ten_wrong_names_are_listed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, lambda t: [t.pop(name) for name in list(t) if ".layers." in name])
    with pytest.raises(WeightLoadError, match=r"input_layernorm.* and 8 more") as error:
        build(tmp_path)
    assert str(error.value).count("model.layers.") == 10


def test_unneeded_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    expected = all_logits(build(tmp_path), PROMPTS)
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit(tmp_path, lambda tensors: tensors.update(leftover))
    assert torch.equal(all_logits(build(tmp_path), PROMPTS), expected)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightLoadError, match=f"missing: {victim.name}"):
        build(tmp_path)


@pytest.mark.parametrize("names", ["numbered", "free"])
def test_several_files_without_an_index_are_loaded(names: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "llama")
    make_checkpoint(tmp_path / "several", "llama", max_shard_size="100KB")
    (tmp_path / "several" / INDEX).unlink()
    (tmp_path / "several" / "adapter_model.safetensors").write_bytes(b"of another model")
    shards = sorted((tmp_path / "several").glob("model-*"))
    assert len(shards) > 2
    if names == "free":
        for number, shard in enumerate(shards):
            shard.rename(shard.with_name(f"part {number}.safetensors"))
    else:
        (tmp_path / "several" / "consolidated.safetensors").write_bytes(b"the same in other names")
    expected = all_logits(build(tmp_path / "one"), PROMPTS)
    assert torch.equal(all_logits(build(tmp_path / "several"), PROMPTS), expected)


@pytest.mark.parametrize("names", ["numbered", "free", "two sets"])
def test_without_an_index_an_error_names_what_is_missing(names: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    (tmp_path / INDEX).unlink()
    first, second, *others = sorted(tmp_path.glob("*.safetensors"))
    message = f"has no {INDEX} and lacks {second.name}"
    tensor = next(iter(load_file(second)))
    second.unlink()
    if names == "free":
        for number, shard in enumerate([first, *others]):
            shard.rename(tmp_path / f"{number}.safetensors")
        message = f"missing: .*{tensor}"
    if names == "two sets":
        (tmp_path / "other-00001-of-00002.safetensors").touch()
        message = "lacks .*other-00002-of-00002"
    with pytest.raises(WeightLoadError, match=message):
        build(tmp_path)


WRONG = {
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "a web page": (b"<!DOCTYPE html><html>Sign in</html>", "web page"),
    "nothing": (b"", "is empty"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize(
    "name", ["model.safetensors", INDEX, "config.json", "generation_config.json"]
)
def test_an_error_says_what_a_file_has_instead_of_its_content(
    case: str, name: str, tmp_path: Path
) -> None:
    content, message = WRONG[case]
    make_checkpoint(tmp_path, "llama")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{name}.*{message}"):
        build(tmp_path)


def test_a_directory_without_weights_is_rejected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightLoadError, match=r"has no weights: neither model\.safetensors"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_rejected_with_code_that_converts_them(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(WeightLoadError, match="pickle runs code") as error:
        build(tmp_path)
    assert name in str(error.value)
    assert "save_pretrained" in str(error.value)
    assert "safe_serialization=True" in str(error.value)


def test_an_error_names_a_damaged_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightLoadError, match=r"can't read .*model\.safetensors"):
        build(tmp_path)


INDEXES: dict[str, tuple[str, str]] = {
    "a list": ("[]", "must contain a JSON object, got list"),
    "no map": ("{}", "weight_map must be a dict, got None"),
    "an empty map": ('{"weight_map": {}}', "names no files"),
    "a map of numbers": ('{"weight_map": {"a": 5}}', r"weight_map\['a'\] must be a string, got 5"),
    "a map of null": ('{"weight_map": {"a": null}}', "must be a string, got None"),
    "a map of lists": ('{"weight_map": {"a": ["x"]}}', "must be a string"),
    "brackets": ("[" * 200_000, "nested too deeply"),
    "a long name": (json.dumps({"weight_map": {"a": "x" * 5000}}), "names files that are missing"),
    "a null byte": (json.dumps({"weight_map": {"a": "x\0y"}}), "names files that are missing"),
    "a directory": (json.dumps({"weight_map": {"a": "."}}), "names files that are missing"),
    "a FIFO": (json.dumps({"weight_map": {"a": "fifo"}}), "names files that are missing: fifo"),
    "above": (
        json.dumps({"weight_map": {"a": "../other.safetensors"}}),
        "outside its folder: ../other",
    ),
    "around": (
        json.dumps({"weight_map": {"a": "x/../../other.safetensors"}}),
        "outside its folder",
    ),
    "absolute": (json.dumps({"weight_map": {"a": "{absolute}"}}), "outside its folder: /"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_names_other_files_is_rejected(case: str, tmp_path: Path) -> None:
    content, message = INDEXES[case]
    directory, other = tmp_path / "model", tmp_path / "other.safetensors"
    make_checkpoint(directory, "llama")
    (directory / "x").mkdir()
    (directory / "model.safetensors").rename(other)
    os.mkfifo(directory / "fifo")
    (directory / INDEX).write_text(content.replace("{absolute}", str(other)), encoding="utf-8")
    with pytest.raises(WeightLoadError, match=message) as error:
        build(directory)
    assert len(str(error.value)) < 800


def test_an_index_that_is_a_fifo_is_rejected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(WeightLoadError, match="not a regular file"):
        build(tmp_path)


def test_files_in_subdirectories_and_links_are_loaded(tmp_path: Path) -> None:
    """As in the hub's cache: a snapshot has links to files that are named after their digests."""
    make_checkpoint(tmp_path / "plain", "llama")
    snapshot, blobs = tmp_path / "snapshots" / "5f3a", tmp_path / "blobs"
    blobs.mkdir()
    (snapshot / "shards").mkdir(parents=True)
    for file in (tmp_path / "plain").iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    expected = all_logits(build(snapshot), PROMPTS)
    (snapshot / "model.safetensors").rename(snapshot / "shards" / "one.safetensors")
    (snapshot / "shards" / "one.safetensors").unlink()
    (snapshot / "shards" / "one.safetensors").symlink_to("../../../blobs/model.safetensors")
    names = load_file(blobs / "model.safetensors")
    weight_map = dict.fromkeys(names, "shards/one.safetensors")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert torch.equal(all_logits(build(snapshot), PROMPTS), expected)


# --- duplicate tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [UnquantizedLinear, PackedLinear])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight",
                                  "model.embed_tokens.weight"])  # fmt: skip
def test_a_tensor_in_two_files_is_rejected(
    name: str, linear: type[LinearMethod], tmp_path: Path
) -> None:
    """The two copies may differ."""
    make_checkpoint(tmp_path, "llama", vocab_size=256)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensors[name]}, tmp_path / "again.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"again": "again.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    kernels = Kernels(DenseAttention())
    kernels.linear = linear
    message = rf"{name} is in two files, again\.safetensors and model\.safetensors"
    with pytest.raises(WeightLoadError, match=message):
        build(tmp_path, kernels=kernels)


def test_a_slot_that_is_filled_twice_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    read = weights.read_tensors

    def twice(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for item in read(*args):
            yield item
            yield item

    monkeypatch.setattr(weights, "read_tensors", twice)
    with pytest.raises(KeyError, match=r"embed_tokens|lm_head|layers"):
        build(tmp_path)


# --- sizes ----------------------------------------------------------------------------------------

SIZES: list[tuple[str, str, int, str]] = [
    # family, key, value, expected part of the message
    (
        "llama",
        "vocab_size",
        300_000,
        "vocab_size=300000, but model.embed_tokens.weight has shape [256,",
    ),
    ("llama", "hidden_size", 2**20, "hidden_size=1048576, but model.embed_tokens.weight has"),
    (
        "llama",
        "intermediate_size",
        2**22,
        "intermediate_size=4194304, but model.layers.0.mlp",
    ),
    ("llama", "num_hidden_layers", 10_000, "num_hidden_layers=10000, but the files have only 21"),
    ("llama", "num_attention_heads", 2**16, "num_attention_heads * head_dim=1048576, but"),
    ("llama", "head_dim", 2**16, "num_attention_heads * head_dim=262144, but"),
    ("llama", "num_key_value_heads", 4, "num_key_value_heads * head_dim=64, but"),
    (
        "qwen3_moe",
        "num_experts",
        4096,
        "num_experts=4096, but model.layers.0.mlp.gate",
    ),
    ("qwen3_moe", "moe_intermediate_size", 2**22, "moe_intermediate_size=4194304, but"),
    (
        "qwen3_moe",
        "intermediate_size",
        2**22,
        "intermediate_size=4194304, but model.layers.1.mlp",
    ),
    ("qwen3_next", "num_attention_heads", 8, "2 * num_attention_heads * head_dim=256, but"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), SIZES)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_size_that_contradicts_the_tensors_is_rejected_before_the_model_is_built(
    family: str, key: str, value: int, message: str, stacked: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_checkpoint(tmp_path, family, fused_experts=stacked, head_dim=16)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}), encoding="utf-8")
    monkeypatch.setattr(loader, "CausalLM", None)  # no model is built
    with pytest.raises(WeightLoadError) as error:
        build(tmp_path)
    assert f"config.json has {message}" in str(error.value)


def test_a_huge_context_is_rejected_before_tables_are_allocated(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_position_embeddings=10**9)
    with pytest.raises(ConfigError, match=r"1000000000 tokens \(max_position_.*max_model_len"):
        build(tmp_path)
    model = build(tmp_path, max_positions=600)
    assert model.model.rotary.table.shape == (600, 16)


def test_dummy_weights_need_no_files_and_depend_only_on_the_seed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    (tmp_path / "model.safetensors").unlink()
    model = build(tmp_path, load_format="dummy")
    again = build(tmp_path, load_format="dummy")
    other = build(tmp_path, load_format="dummy", seed=1)
    logits = all_logits(model, PROMPTS)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, all_logits(again, PROMPTS))
    assert not torch.equal(logits, all_logits(other, PROMPTS))
    weight = model.model.embed_tokens.weight
    assert 0.015 < weight.std() < 0.025
    assert len(weight.unique(dim=0)) == 256
    assert 0.9 < model.model.norm.weight.mean() < 1.1
    half = build(tmp_path, load_format="dummy", shard=Shard(1, 2))
    assert torch.equal(half.model.embed_tokens.weight, weight[128:])


def test_every_parameter_is_filled(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", attention_bias=True)
    model = build(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    slots = {name: slot for name, slot in weight_slots(model).items() if slot.on_missing is None}
    fused = {name: slot for name, slot in slots.items() if slot.pieces}
    assert len(fused) == 4  # two layers of experts
    for name in fused:
        slots |= slots.pop(name).pieces
    assert slots.keys() == stored.keys()
    for name, slot in slots.items():
        slot.store(stored[name])
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_peak_memory_of_loading_is_far_below_two_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    raw |= {"vocab_size": 4096, "num_attention_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    empty = CausalLM(load_model_config(tmp_path), make_context(device=torch.device("meta")))
    tensors = {
        name: torch.ones(slot.shape, dtype=torch.bfloat16)
        for name, slot in weight_slots(empty).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors

    rss = psutil.Process().memory_info
    sizes = []
    read = weights.read_tensors

    def recorded(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for item in read(*args):
            yield item
            sizes.append(rss().rss)

    monkeypatch.setattr(weights, "read_tensors", recorded)
    monkeypatch.setattr(files, "MAPPED_BYTES", 4 << 20)
    before = rss().rss
    model = build(tmp_path)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    peak = max(sizes) - before
    assert weight_bytes > 120e6
    assert peak < 1.2 * weight_bytes, f"{peak / weight_bytes:.2f} times the weights"
