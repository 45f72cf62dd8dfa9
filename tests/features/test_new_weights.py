"""New weights in a running LLM: it then has the outputs of an LLM of the new checkpoint."""

from __future__ import annotations

import runpy
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, DiskTier, HostTier, SamplingParams
from nanoengine.checkpoint.quantization import resolve_quantization
from nanoengine.errors import EngineDeadError, NanoEngineError, WeightLoadError
from nanoengine.features.new_weights import load_weights
from nanoengine.layers import packed
from nanoengine.layers.placement import place_buffers
from nanoengine.runner import start
from tests.support.checkpoints import make_checkpoint
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import finish, greedy, make_engine, random_prompts, run, tokens
from tests.support.gguf_files import make_gguf
from tests.support.late_device import make_graph_safe
from tests.support.model_helpers import cpu_kernels
from tests.support.quantized_checkpoints import gptq, write_quantized
from tests.support.thread_ranks import thread_ranks_fixture as thread_ranks_fixture

ROOT = Path(__file__).parents[2]
PROMPTS = random_prompts(3, [5, 40, 21])
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
QUANTIZATIONS = ("int8", "int4", "int8_weight_only", "int4_weight_only")
SMALL = {"num_kv_blocks": 32, "max_model_len": 128, "skip_tokenizer_init": True, "device": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns a function (family, overrides) -> two checkpoints with different weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str, **overrides):
        name = f"{family}{overrides}"
        if name not in made:
            path = tmp_path_factory.mktemp("pair")
            old, new = path / "old", path / "new"
            make_checkpoint(old, family, **overrides)
            make_checkpoint(new, family, **overrides)
            tensors = load_file(new / "model.safetensors")
            generator = torch.Generator().manual_seed(7)
            tensors = {
                name: (t + 0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype)
                for name, t in tensors.items()
            }
            save_file(tensors, new / "model.safetensors")
            made[name] = old, new
        return made[name]

    return get


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def answers_of(folder: Path, **options) -> list[tuple[list[int], float]]:
    with LLM(folder, **options) as llm:
        return answers(llm)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


CASES = [
    ("qwen3", {}, {"dtype": "float32"}),
    ("qwen3", {}, {"dtype": "bfloat16"}),
    ("qwen3", {}, {"dtype": "float64", "attention_backend": "naive"}),
    ("qwen3", {"tie_word_embeddings": False}, {"dtype": "bfloat16"}),
    *(
        ("qwen2", {"tie_word_embeddings": i % 2 == 0}, {"dtype": "float32", "quantization": kind})
        for i, kind in enumerate(QUANTIZATIONS)
    ),
    ("qwen2", {}, {"dtype": "float64", "attention_backend": "naive", "quantization": "int4"}),
    ("gemma3", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {}, {"dtype": "float32", "quantization": "int8"}),
    ("mixtral", {}, {"dtype": "float32"}),
    ("qwen3_next", {}, {"dtype": "float32"}),
    ("gpt_oss", {}, {"dtype": "float32"}),
    ("deepseek_v3", {}, {"dtype": "float32"}),
    ("phi3", {}, {"dtype": "float32"}),
]


@pytest.mark.parametrize(("family", "overrides", "options"), CASES, ids=map(str, CASES))
def test_outputs_equal_an_llm_of_the_new_checkpoint(pair, family, overrides, options):
    old, new = pair(family, **overrides)
    expected = answers_of(new, **SMALL, **options)
    with LLM(old, **SMALL, **options) as llm:
        before = answers(llm)
        assert before != expected
        llm.load_weights(new)
        assert answers(llm) == expected
        llm.load_weights(tensors_of(old))
        assert answers(llm) == before
        for one in tensors_of(new).items():  # as training scripts pass them
            assert llm.load_weights([one]) == {one[0]}
        assert answers(llm) == expected


# --- slices of a matrix ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", *QUANTIZATIONS])
@pytest.mark.parametrize(("first", "count"), [(0, 40), (16, 16), (5, 20), (30, 10), (17, 1)])
def test_new_rows_replace_old_rows_in_place(kind, first, count):
    """Also with old and new rows in one panel of 16 rows, and with a narrower last panel."""
    old, new = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(first))
    quantization = resolve_quantization(kind, None, device="cpu") if "int" in kind else None
    dtype = torch.float32 if quantization else getattr(torch, kind)
    linear = cpu_kernels(torch.float32, quantization).linear
    both = old.clone()
    both[first : first + count] = new[:count]

    def made(weight):
        method = linear("model.layers.0.mlp.down_proj")
        method.create(weight.shape, dtype, torch.device("cpu"))
        method.load(weight[:16])
        method.load(weight[16:], 16)
        place_buffers(torch.nn.ModuleList([torch.nn.BatchNorm1d(9), method]))  # as for a model
        return method

    expected, method = made(both), made(old)
    memory = (method.weight if quantization is None else method.values).data_ptr()
    method.load(new[:count], first)
    method.finish()
    x = torch.randn(7, 64)
    assert torch.equal(method.apply(x, None), expected.apply(x, None))
    assert (method.weight if quantization is None else method.values).data_ptr() == memory


def test_the_argmax_bound_of_a_head_uses_the_new_weights(monkeypatch):
    monkeypatch.setattr(packed, "MIN_PRUNED_BYTES", 0)
    old, new = torch.randn(2, 64, 64)
    head = packed.PrunedArgmaxHead("lm_head")
    head.create(old.shape, torch.float32, torch.device("cpu"))
    head.load(old)
    copy = head.values.data_ptr()
    head.load(new)
    x = torch.randn(5, 64)
    assert head.argmax(x)[0].tolist() == (x @ new.T).argmax(1).tolist()
    assert head.values.data_ptr() == copy


# --- running requests and cached blocks -----------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"num_kv_blocks": 8, "block_size": 8}])
def test_running_requests_continue_with_the_new_weights(pair, options):
    """No token is lost, and the KV cache is recomputed with the new weights."""
    old, new = pair("qwen3")
    engine = make_engine(str(old), **options)
    requests = [engine.add_request(f"{i}", p, greedy(12)) for i, p in enumerate(PROMPTS)]
    for _ in range(5):
        engine.step()
    load_weights(engine, new)
    before = [list(r.sequences[0].token_ids) for r in requests]
    assert len(before[0]) - len(PROMPTS[0]) >= 4
    finish(engine)
    with_new = make_engine(str(new))
    for request, prompt, known in zip(requests, PROMPTS, before, strict=True):
        left = len(prompt) + 12 - len(known)
        (expected,) = run(with_new, [known], greedy(left))
        assert request.sequences[0].token_ids == expected.sequences[0].token_ids
    engine.close()
    with_new.close()


def test_new_weights_do_not_use_old_blocks_of_a_host_tier(pair):
    old, new = pair("qwen3")
    options = SMALL | {"num_kv_blocks": 9, "block_size": 8, "max_model_len": 64}
    expected = answers_of(new, **options)
    with LLM(old, kv_tiers=[HostTier(gib=0.01, policy="load")], **options) as llm:
        answers(llm)
        answers(llm)
        (host,) = llm.stats().tiers
        assert host.loaded_blocks
        llm.load_weights(new)
        assert answers(llm) == expected


def test_graphs_read_the_new_weights(pair):
    old, new = pair("qwen3")
    fresh = make_engine(str(new))
    expected = tokens(run(fresh, PROMPTS, greedy(4)))
    with EmulatedGPU() as gpu, mock.patch.object(start, "make_backend", make_graph_safe):
        engine = make_engine(
            str(old), device="cuda", num_kv_blocks=20, max_num_seqs=2, max_model_len=64
        )
        run(engine, PROMPTS, greedy(4))
        replayed = gpu.num_replayed
        load_weights(engine, tensors_of(new))
        assert tokens(run(engine, PROMPTS, greedy(4))) == expected
        assert gpu.num_replayed > replayed > 0
        engine.close()
        assert not gpu.disorder


@pytest.mark.usefixtures("thread_ranks")
def test_each_rank_loads_its_part_of_the_new_weights(pair):
    old, new = pair("qwen3")
    options = {"dtype": "float32", "attention_backend": "cpu", "device": "cpu"}
    fresh = make_engine(str(new), tensor_parallel_size=2, **options)
    expected = tokens(run(fresh, PROMPTS, greedy(8)))
    fresh.close()
    engine = make_engine(str(old), tensor_parallel_size=2, **options)
    before = tokens(run(engine, PROMPTS, greedy(8)))
    with pytest.raises(WeightLoadError, match="unknown: model_what"):
        load_weights(engine, {"model_what": torch.ones(1)})
    assert tokens(run(engine, PROMPTS, greedy(8))) == before != expected
    load_weights(engine, new)
    assert tokens(run(engine, PROMPTS, greedy(8))) == expected
    load_weights(engine, tensors_of(old).items())
    assert tokens(run(engine, PROMPTS, greedy(8))) == before
    engine.close()


# --- names and refusals ---------------------------------------------------------------------------


def test_parameter_names_of_transformers_models_are_accepted(pair):
    """They differ from the names in its files; a tied head appears twice."""
    from transformers import AutoModelForCausalLM

    for family, overrides in [("mixtral", {}), ("qwen3", {"tie_word_embeddings": True})]:
        old, new = pair(family, **overrides)
        model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
        expected = answers_of(new, dtype="float32", **SMALL)
        for pairs in (model.state_dict(), model.named_parameters()):
            with LLM(old, dtype="float32", **SMALL) as llm:
                llm.load_weights(pairs)
                assert answers(llm) == expected


def test_a_tied_head_without_the_embedding_replaces_it(pair):
    old, new = pair("qwen3", tie_word_embeddings=True)
    embedding = tensors_of(new)["model.embed_tokens.weight"]
    with LLM(old, **SMALL) as llm:
        llm.load_weights([("model.embed_tokens.weight", embedding)])
        expected = answers(llm)
    with LLM(old, **SMALL) as llm:
        assert llm.load_weights([("lm_head.weight", embedding)]) == {"lm_head.weight"}
        assert answers(llm) == expected


EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def test_weights_that_do_not_fit_raise_and_change_nothing(pair, tmp_path):
    old, new = pair("qwen3", tie_word_embeddings=True)
    good = tensors_of(new)
    other, _ = pair("qwen3", rms_norm_eps=1e-3)
    with LLM(old, **SMALL) as llm:
        before = answers(llm)
        for weights, why in [
            ({**good, "model.layers.9.what": good[NORM]}, "unknown: model.layers.9.what"),
            (
                {**good, NORM: torch.ones(3)},
                r"mis-shaped: model.norm.weight \[3\], exp",
            ),
            ({**good, NORM: torch.ones(64, dtype=torch.int8)}, "not floats: model.norm.weight"),
            ({**good, "lm_head.weight": good[EMBEDDING] + 1}, "differ: pass only one"),
            ([(NORM, good[NORM])] * 2, "twice"),
            ({**good, NORM: None}, "must be tensors, got model.norm.weight"),
            ([], "there are no tensors"),
            (other, "different rms_norm_eps"),
            (tmp_path, "has no weights"),
        ]:
            with pytest.raises(WeightLoadError, match=why):
                llm.load_weights(weights)
            assert answers(llm) == before, why


def test_models_that_do_not_support_new_weights_raise(pair, tmp_path):
    old, _ = pair("llama")
    with (
        LLM(
            old, kv_tiers=[HostTier(gib=0.01), DiskTier(tmp_path / "kv", gib=0.01)], **SMALL
        ) as llm,
        pytest.raises(WeightLoadError, match="disk tier"),
    ):
        llm.load_weights(old)
    write_quantized(tmp_path, "llama", GPTQ, gptq)
    with (
        LLM(tmp_path / "quantized", **SMALL) as llm,
        pytest.raises(WeightLoadError, match="stores them in int4, not as floats"),
    ):
        llm.load_weights(old)


def test_only_a_gguf_file_replaces_a_gguf_file(tmp_path):
    """Why: Gemma's norm weights are stored plus 1 in a GGUF file, under the same name."""
    old, new, other = (tmp_path / f"{name}.gguf" for name in ("old", "new", "other"))
    for seed, path in enumerate((old, new)):
        make_gguf(path, "gemma2", seed=seed, query_pre_attn_scalar=32)
    make_gguf(other, "gemma2", query_pre_attn_scalar=32, rms_norm_eps=1e-3)
    expected = answers_of(new, **SMALL)
    folder = old.with_suffix("")
    for model, weights, why in (
        (folder, new, "a GGUF file if this model"),
        (old, folder, "a GGUF file if this model"),
        (old, tensors_of(folder), "a GGUF file if this model"),
        (old, other, "different rms_norm_eps"),
    ):
        with LLM(model, **SMALL) as llm:
            before = answers(llm)
            with pytest.raises(WeightLoadError, match=why):
                llm.load_weights(weights)
            assert answers(llm) == before
    with LLM(old, **SMALL) as llm:
        llm.load_weights(new)
        assert answers(llm) == expected


def test_an_incomplete_file_ends_the_llm(pair):
    """Why: part of the model already has the new weights."""
    old, new = pair("qwen3")
    llm = LLM(old, **SMALL)
    with (
        mock.patch("nanoengine.runner.new_weights.read_tensors", side_effect=fail_to_read),
        pytest.raises(EngineDeadError, match="only a part of the new weights"),
    ):
        llm.load_weights(new)
    with pytest.raises(NanoEngineError, match="closed"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def fail_to_read(file, parts):
    raise WeightLoadError(f"can't read {file}")


def test_a_loss_of_precision_is_warned_about(pair):
    old, _ = pair("qwen3", dtype=torch.bfloat16)
    tensors = tensors_of(old)
    with LLM(old, dtype="float32", **SMALL) as llm:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.load_weights(tensors)
        with pytest.warns(UserWarning, match="rounded to torch.bfloat16"):
            llm.load_weights({name: tensor.float() for name, tensor in tensors.items()})


# --- the example ----------------------------------------------------------------------------------


def test_the_policy_of_the_example_learns(monkeypatch):
    """It trains for a few short rounds and checks that the sampler's own rewards grow."""
    example = runpy.run_path(str(ROOT / "examples" / "policy_gradient.py"))
    main = example["main"]
    short = replace(example["PARAMS"], n=48, max_tokens=10)
    monkeypatch.setitem(main.__globals__, "PARAMS", short)
    means = main(7)
    assert sum(means[-2:]) > 1.15 * sum(means[:2])
