"""The side-by-side scripts without a GPU: driver, checkpoint, one engine, and the shim."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoengine.attention.naive import NaiveBackend
from nanoengine.bench.workload import random_workload
from tests.support.attention_cases import make_case

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_peers"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """The scripts find each other as if run from their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("common", "run_all", "run_nanoengine", "run_vllm", "make_checkpoint", "fa3"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint, as the script writes it."""
    directory = tmp_path_factory.mktemp("checkpoint")
    script = str(FOLDER / "make_checkpoint.py")
    subprocess.run([sys.executable, script, str(directory), "--shape", "tiny"], check=True)
    return directory


# --- the driver -----------------------------------------------------------------------------------


def line(label, seconds):
    result = {"label": label, "seconds": seconds, "output_tokens": 100, "copy_gbs": 4000.0}
    return json.dumps(result | {"output_tokens_per_s": 100 / seconds})


def test_engines_take_turns_and_a_missing_one_is_named_once():
    run_all = importlib.import_module("run_all")
    calls, kept = [], []
    speeds = iter([1.0, 4.0, 2.0, 5.0, 3.0, 6.0])

    def start(peer, arguments, limit_s):
        calls.append(peer.label)
        assert arguments == ["--model", "m", "--label", peer.label]
        assert limit_s == 60
        if peer.label == "vllm":
            return '{"label": "vllm", "skipped": "can\'t be imported: No module named vllm"}\n'
        if peer.label == "nano-vllm, FA3":
            return "Traceback: it died\n"
        return f"some noise\n{line(peer.label, next(speeds))}\nmore noise\n"

    labels = ["nanoengine", "nano-vllm", "vllm", "nano-vllm, FA3"]
    peers = [next(p for p in run_all.PEERS if p.label == label) for label in labels]
    results = run_all.run_rounds(peers, 3, ["--model", "m"], 60, kept.append, start)
    turns = ["nanoengine", "nano-vllm", "nano-vllm, FA3"]
    assert calls == [*labels, *turns, *turns]
    assert kept == results
    text = run_all.table(results)
    assert "nanoengine                              100     2.00       50" in text
    assert "33-100" in text
    assert text.count("skipped in round 1: can't be imported: No module named vllm") == 1
    assert text.count("ended without a result") == 3


def test_a_hanging_engine_and_a_missing_interpreter_are_results(monkeypatch):
    run_all = importlib.import_module("run_all")

    def hang(peer, arguments, limit_s):
        raise subprocess.TimeoutExpired("peer", limit_s)

    peer = run_all.PEERS[0]
    assert run_all.run_once(peer, [], 5, hang)["failed"] == "took longer than 5 s"
    monkeypatch.setenv("PEER_PYTHON_NANOENGINE", "/nowhere/python")
    assert "can't be run" in run_all.run_once(peer, [], 5, run_all.start)["skipped"]


def test_every_peer_has_a_script_and_a_name_of_its_own():
    run_all = importlib.import_module("run_all")
    assert all((FOLDER / peer.script).is_file() for peer in run_all.PEERS)
    assert len({peer.label for peer in run_all.PEERS}) == len(run_all.PEERS)


# --- what every script does -----------------------------------------------------------------------


def args_for(checkpoint, label="x", requests=3, longest=8):
    return SimpleNamespace(model=str(checkpoint), label=label, requests=requests, longest=longest)


def test_the_workload_is_the_standard_one():
    common = importlib.import_module("common")
    items = common.workload(256, 1024)
    assert items == list(random_workload())


def test_a_run_warms_up_on_other_ids_and_times_the_work_alone(checkpoint, capsys):
    common = importlib.import_module("common")
    times = iter([0.0, 7.0, 100.0, 104.0])
    seen = []

    def generate(items):
        seen.append([item.prompt_token_ids for item in items])
        return [[1] * item.max_tokens for item in items]

    result = common.run(
        args_for(checkpoint),
        lambda: common.Engine(generate, {"note": "n"}),
        bandwidth=lambda: 4000.0,
        clock=lambda: next(times),
    )
    items = common.workload(3, 8)
    assert result["load_s"] == 7.0
    assert result["seconds"] == 4.0
    assert result["output_tokens"] == sum(item.max_tokens for item in items)
    assert result["output_tokens_per_s"] == result["output_tokens"] / 4.0
    warm_up, timed = seen
    assert [len(ids) for ids in warm_up] == [len(ids) for ids in timed]
    assert all(a[0] != b[0] for a, b in zip(warm_up, timed, strict=True))
    assert max(map(max, timed)) < 4096
    assert json.loads(capsys.readouterr().out) == result


def test_missing_and_failing_engines_say_why(checkpoint):
    common = importlib.import_module("common")

    def absent():
        raise ModuleNotFoundError("No module named 'vllm'")

    def short():
        return common.Engine(lambda items: [[1]] * len(items), {})

    assert "No module named 'vllm'" in common.run(args_for(checkpoint), absent)["skipped"]
    assert "output tokens, not" in common.run(args_for(checkpoint), short)["failed"]


def test_vllm_that_is_not_installed_is_skipped(checkpoint):
    run_vllm = importlib.import_module("run_vllm")
    common = importlib.import_module("common")
    result = common.run(args_for(checkpoint), lambda: run_vllm.load(str(checkpoint)))
    assert "vllm" in result["skipped"]


def test_nanoengine_runs_the_checkpoint(checkpoint):
    common = importlib.import_module("common")
    run_nanoengine = importlib.import_module("run_nanoengine")
    pairs = ["device=cpu", "attention_backend=naive", "num_kv_blocks=300", "dtype=bfloat16"]
    options = run_nanoengine.options_of(pairs)
    assert options["num_kv_blocks"] == 300
    result = common.run(
        args_for(checkpoint),
        lambda: run_nanoengine.load(str(checkpoint), options),
        bandwidth=lambda: 1.0,
    )
    assert result["attention"] == "naive"
    assert result["output_tokens_per_s"] > 0


def test_the_checkpoint_is_what_transformers_reads(checkpoint):
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id is not None


# --- the shim -------------------------------------------------------------------------------------


class OverNaive(NaiveBackend):
    """Stands in for the Triton backend on a CPU."""

    def __init__(self, **options):
        super().__init__(**options)


@pytest.fixture
def shim(monkeypatch):
    """Imports the shim over given kernels."""
    monkeypatch.syspath_prepend(str(FOLDER / "shim"))
    names = ("flash_attn", "flash_attn.over_triton", "flash_attn.over_fa3")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(kernels):
        monkeypatch.setenv("FLASH_ATTN_SHIM", kernels)
        return importlib.import_module("flash_attn")

    yield load
    for name in names:
        sys.modules.pop(name, None)


def fake_vllm(monkeypatch):
    """vLLM's function in plain torch, with the rules of its arguments."""

    def attend(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
        softmax_scale=None, causal=False, block_table=None, fa_version=2,
    ):  # fmt: skip
        assert causal
        assert fa_version == 3
        assert (seqused_k is None) == (block_table is None) == (cu_seqlens_k is not None)
        out = torch.empty_like(q)
        for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
            if block_table is None:
                low, high = cu_seqlens_k[i : i + 2].tolist()
                keys, values = k[low:high], v[low:high]
            else:
                length = int(seqused_k[i])
                assert length <= max_seqlen_k
                keys, values = (c[block_table[i].long()].flatten(0, 1)[:length] for c in (k, v))
            distance = torch.arange(len(keys) - (end - start), len(keys))[:, None]
            mask = distance >= torch.arange(len(keys))[None]
            heads = [x.transpose(0, 1) for x in (q[start:end], keys, values)]
            found = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            out[start:end] = found.transpose(0, 1)
        return out

    for name in ("vllm", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        module = ModuleType(name)
        module.flash_attn_varlen_func = attend
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kernels", ["triton", "fa3"])
def test_the_shim_computes_what_flash_attn_does(shim, monkeypatch, kernels):
    if kernels == "fa3":
        fake_vllm(monkeypatch)
    package = shim(kernels)
    if kernels == "triton":
        monkeypatch.setattr("flash_attn.over_triton.TritonBackend", OverNaive)
        sys.modules["flash_attn.over_triton"].backend.cache_clear()
    scale = 0.25

    decodes = make_case((1, 5), (1, 40), (1, 17), group_size=2, num_kv_heads=2, scale=scale)
    expected = decodes.run(naive(decodes))  # stores, too
    batch = decodes.batch
    caches = decodes.k_cache.nan_to_num(), decodes.v_cache.nan_to_num()
    out = package.flash_attn_with_kvcache(
        decodes.q[:, None], *caches, cache_seqlens=batch.seq_lens,
        block_table=batch.block_tables[1], softmax_scale=scale, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(out[:, 0], expected)

    prompts = make_case((5, 5), (70, 70), (16, 16), group_size=2, num_kv_heads=2, scale=scale)
    starts = prompts.batch.query_start_loc
    lengths = {"cu_seqlens_q": starts, "max_seqlen_q": 70, "max_seqlen_k": 70}
    dense = package.flash_attn_varlen_func(
        prompts.q, prompts.k, prompts.v, cu_seqlens_k=starts, **lengths,
        softmax_scale=scale, causal=True, block_table=None,
    )  # fmt: skip
    torch.testing.assert_close(dense, prompts.run(naive(prompts)))

    chunks = make_case((5, 30), (20, 20), group_size=2, num_kv_heads=2, scale=scale)
    expected = chunks.run(naive(chunks))
    batch = chunks.batch
    paged = package.flash_attn_varlen_func(
        chunks.q, chunks.k_cache.nan_to_num(), chunks.v_cache.nan_to_num(),
        cu_seqlens_q=batch.query_start_loc, cu_seqlens_k=torch.tensor([0, 30, 50]).int(),
        max_seqlen_q=20, max_seqlen_k=30, softmax_scale=scale, causal=True,
        block_table=batch.block_tables[1],
    )  # fmt: skip
    torch.testing.assert_close(paged, expected)


def naive(case):
    return NaiveBackend(device=torch.device("cpu"), dtype=case.q.dtype, head_dim=64, block_size=16)


def test_the_shim_refuses_what_it_does_not_do(shim):
    with pytest.raises(ImportError, match="must be fa3 or triton, got 'numpy'"):
        shim("numpy")


# --- the yardstick --------------------------------------------------------------------------------


def test_the_yardstick_compares_on_the_same_cache(monkeypatch):
    fa3 = importlib.import_module("fa3")
    heads = fa3.Heads(num_heads=4, num_kv_heads=2, head_dim=32)
    monkeypatch.setattr(fa3.kernels, "ROTATED_BYTES", 20_000)
    plain = fa3.ours("naive", torch.device("cpu"), heads)
    attends = {"one": plain, "two": lambda *inputs: plain(*inputs) + 0.5}

    def timer(work):
        work()
        return 2.0

    (row,) = fa3.compare(
        attends, torch.device("cpu"), timer, heads=heads, batches=(3,), contexts=(33,)
    )
    kv_bytes = 3 * 33 * 2 * 2 * 32 * 2
    assert row["one_gbs"] == row["two_gbs"] == kv_bytes * -(-20_000 // kv_bytes) / 2.0 / 1e9
    assert row["max_difference"] == pytest.approx(0.5, abs=0.01)
