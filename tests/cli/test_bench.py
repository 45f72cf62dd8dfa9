"""The benchmark: its workloads to the token, its report, and the baseline it compares with."""

from __future__ import annotations

import doctest
import importlib
import json
import random
import re
import statistics
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from nanoengine.cli import bench, rounds, workload
from nanoengine.cli.bench import BenchArgs
from nanoengine.cli.bench_report import format_report
from nanoengine.cli.hf_baseline import HFBaseline
from nanoengine.cli.workload import SHAPES, WorkItem
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.observe.peak import Peaks
from tests.support.fake_executor import Ready


def test_standard_workload_is_the_field_s() -> None:
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    items = bench.make_workload(BenchArgs(), "unused")
    assert [list(item.prompt_token_ids) for item in items] == prompts
    assert [item.max_tokens for item in items] == lengths
    assert sum(map(len, prompts)) == 142_827
    assert sum(lengths) == 133_966


def test_ids_are_taken_modulo_the_vocabulary_and_it_is_said() -> None:
    items = [WorkItem(prompt_token_ids=(3, 10, 25), max_tokens=2)]
    fitted, notes = workload.fit(items, 10, 100, cap=False)
    assert fitted[0].prompt_token_ids == (3, 0, 5)
    assert notes == ["prompt ids are taken modulo the vocabulary of 10"]
    assert workload.fit(items, 26, 100, cap=False) == (items, [])


def test_requests_beyond_the_context_are_refused_or_cut_visibly() -> None:
    items = [WorkItem(prompt_token_ids=tuple(range(8)), max_tokens=n) for n in (2, 5, 50)]
    with pytest.raises(ConfigError, match=r"8 \+ 5 tokens exceeds max_model_len=10"):
        workload.fit(items, 100, 10, cap=False)
    fitted, notes = workload.fit(items, 100, 10, cap=True)
    assert [(len(i.prompt_token_ids), i.max_tokens) for i in fitted] == [(8, 2), (5, 5), (1, 9)]
    assert notes == ["2 of 3 requests are cut to the context of 10"]


def test_rounds_share_no_prefix() -> None:
    items = list(workload.random_workload(4, (5, 9), (1, 1), seed=1))
    fitted, _ = workload.fit(items, 100, 50, cap=False)
    moved = workload.shifted(fitted, 1, 100)
    for before, after in zip(fitted, moved, strict=True):
        assert len(before.prompt_token_ids) == len(after.prompt_token_ids)
        assert before.prompt_token_ids[0] != after.prompt_token_ids[0]


def test_shared_prefix_workload() -> None:
    args = BenchArgs(
        dataset="shared-prefix", prefix_len=20, input_len=(3, 3), output_len=(4, 4), num_requests=5
    )
    prompts = [item.prompt_token_ids for item in bench.make_workload(args, "unused")]
    assert {len(prompt) for prompt in prompts} == {23}
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:] for prompt in prompts}) == 5


def test_csv_workload_has_the_lengths_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\ny,396,109\nz,1,1\n")
    items = bench.make_workload(BenchArgs(dataset=str(path), num_requests=2), "unused")
    assert [(len(i.prompt_token_ids), i.max_tokens) for i in items] == [(374, 44), (396, 109)]
    path.write_text("ContextTokens\n5\n")
    with pytest.raises(ConfigError, match="row 1 must hold integers"):
        bench.make_workload(BenchArgs(dataset=str(path)), "unused")


def test_jsonl_workload_takes_ids_or_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6], "max_tokens": 3}\n\n{"prompt": "abc"}\n')
    items = list(workload.jsonl_workload(path, 9, (7, 7), 0, lambda text: [ord(c) for c in text]))
    assert items == [
        WorkItem(prompt_token_ids=(5, 6), max_tokens=3),
        WorkItem(prompt_token_ids=(97, 98, 99), max_tokens=7),
    ]
    for bad in ('{"text": "abc"}', "not json", "[1]"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl:1 must be a JSON object"):
            bench.make_workload(BenchArgs(dataset=str(path)), "unused")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (BenchArgs(dataset="nowhere.csv"), "dataset must be random, shared-prefix, or an existing"),
        (BenchArgs(input_len=(5, 4)), "input_len must be a range of positive lengths, got 5 4"),
        (BenchArgs(num_requests=0), "num_requests must be at least 1, got 0"),
        (BenchArgs(rounds=0), "rounds must be at least 1, got 0"),
        (BenchArgs(output_len=(0, 4)), "output_len must be a range of positive lengths, got 0 4"),
    ],
)
def test_bad_workload_options_are_refused(args: BenchArgs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.make_workload(args, "unused")


def test_smoke_is_small_and_explicit_options_win() -> None:
    smoke = bench.make_workload(BenchArgs(smoke=True), "unused")
    assert len(smoke) == 32
    assert max(len(item.prompt_token_ids) + item.max_tokens for item in smoke) <= 256
    assert len(bench.make_workload(BenchArgs(smoke=True, num_requests=3), "unused")) == 3


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [("tiny", 4_983_552), ("small", 99_146_368), ("qwen3-0.6b", 596_049_920)],
)
def test_shapes_are_what_transformers_reads(
    shape: str, num_parameters: int, tmp_path: Path
) -> None:
    args = BenchArgs(shape=shape, load_format="dummy", dtype="bfloat16")
    config = bench.engine_config(args, tmp_path)
    assert config.model == str(tmp_path)
    assert config.dtype == "bfloat16"
    loaded = AutoConfig.from_pretrained(config.model)
    for name, value in SHAPES[shape].items():
        if name != "torch_dtype":
            assert getattr(loaded, name) == value
    assert loaded.tie_word_embeddings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    assert model.num_parameters() == num_parameters
    assert rounds.model_cost(config, 2).head_params == loaded.vocab_size * loaded.hidden_size


def test_a_shape_needs_dummy_weights(tmp_path: Path) -> None:
    for args in (
        BenchArgs(shape="tiny"),
        BenchArgs(shape="tiny", load_format="dummy", model="some/model"),
    ):
        with pytest.raises(ConfigError, match="--shape has no weights"):
            bench.engine_config(args, tmp_path)


def test_options_of_the_engine_and_of_the_benchmark_share_one_command_line() -> None:
    line = "--shape tiny --load-format dummy --num-kv-blocks 64 --input-len 5 9 --json out.json"
    args = tyro.cli(BenchArgs, args=line.split())
    assert args == BenchArgs(
        shape="tiny",
        load_format="dummy",
        num_kv_blocks=64,
        input_len=(5, 9),
        json=Path("out.json"),
    )


# --- the whole run, over the real engine with an executor that computes nothing -------------------


class CountingExecutor:
    """Answers each sampled row with token 1, and says that a step took a second of forward."""

    def launch(self, plan: StepPlan) -> Ready:
        tokens = [[1] * min(n, 1) for n in plan.num_logits]
        return Ready(StepResult(token_ids=tokens, times=StepTimes(forward_s=1.0)))


class FakeLLM:
    """As much of `LLM` as the benchmark uses."""

    lose_tokens = False

    def __init__(self, model: str, *, max_num_seqs: int, **options: object) -> None:
        layout = KVLayout(
            num_blocks=100, block_size=16, block_bytes=1024, groups=(KVGroup(layers=(0,)),)
        )
        scheduler = Scheduler(
            BlockManager(layout), max_num_seqs=max_num_seqs, max_num_batched_tokens=8192
        )
        info = EngineInfo(
            model_name=model,
            vocab_size=4096,
            eos_token_ids=(2,),
            max_model_len=2048,
            dtype="float32",
            device="cpu",
            attention_backend="cpu",
            num_parameters=1_000_000,
            weight_bytes=4_000_000,
            num_kv_blocks=100,
            block_size=16,
            block_bytes=1024,
            load_s=1.5,
            start_s=2.5,
            memory_plan="",
        )
        self.engine = LLMEngine(CountingExecutor(), scheduler, info)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to give back."""

    def generate(self, prompts: list, params: list, use_tqdm: bool) -> list:
        requests = [
            self.engine.add_request(str(i), prompt["prompt_token_ids"], p)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        while self.engine.has_unfinished():
            self.engine.step()
        lost = 1 if self.lose_tokens else 0
        return [
            SimpleNamespace(
                request_id=request.request_id,
                outputs=[SimpleNamespace(token_ids=s.output_token_ids[lost:])],
                metrics=SimpleNamespace(ttft_s=0.25, e2e_s=2.0),
            )
            for request in requests
            for s in request.sequences
        ]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("nanoengine.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "nanoengine.llm", module)
    monkeypatch.setattr(FakeLLM, "lose_tokens", False)
    peaks = Peaks(read_gbs=10.0, gemm_gflops=100.0, dtype="float32", by="avx2")
    monkeypatch.setattr("nanoengine.observe.peak.measure_peaks", lambda *_, **__: peaks)
    return FakeLLM


SMALL = {
    "shape": "tiny",
    "load_format": "dummy",
    "device": "cpu",
    "num_requests": 6,
    "input_len": (20, 40),
    "output_len": (3, 9),
}


def test_report_adds_up(
    fake_llm: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    bench.main(BenchArgs(**SMALL, max_num_seqs=4, json=path))
    report = json.loads(path.read_text())
    items = list(workload.random_workload(6, (20, 40), (3, 9), seed=0))
    inputs = sum(len(item.prompt_token_ids) for item in items)
    outputs = sum(item.max_tokens for item in items)
    assert report["workload"]["input_tokens"] == report["prefill"]["tokens"] == inputs
    assert report["workload"]["output_tokens"] == outputs
    assert report["decode"]["tokens"] == outputs - 6
    assert report["prefill"]["seconds"] + report["decode"]["seconds"] >= report["steps"]
    assert report["max_batch"] == 4
    assert report["output_tokens_per_s"] == pytest.approx(outputs / report["seconds"][0])
    assert report["counters"]["prefill_tokens"] == inputs
    assert report["prefill_waste_frac"] == report["hit_rate"] == 0.0
    assert report["latency"]["ttft_s"] == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert report["achieved"]["bandwidth_frac"] == pytest.approx(report["achieved"]["gbs"] / 10)
    assert {"date", "command", "hardware", "versions"} <= set(report)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "prompt ids are taken modulo the vocabulary of 4,096" in text
    assert "load 1.50 s, start 2.50 s" in text


def test_hits_and_preemptions_of_the_timed_round_only(
    fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    args = BenchArgs(**SMALL | {"input_len": (1, 1)}, dataset="shared-prefix", prefix_len=64)
    config = bench.engine_config(args, tmp_path)
    report = bench.run(args, config, FakeLLM("tiny", max_num_seqs=8))
    # All six share four blocks of 16; the first computes them, the others hit. The warm-up had
    # other ids, so it left nothing to hit.
    assert report["counters"]["cache_hit_tokens"] == 5 * 64
    assert report["hit_rate"] == pytest.approx(5 * 64 / (6 * 65))
    assert report["counters"]["preemptions"] == 0


def test_drafts_are_reported_where_there_were_any(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    args = BenchArgs(**SMALL)
    report = bench.run(args, bench.engine_config(args, tmp_path), FakeLLM("t", max_num_seqs=8))
    assert "drafts" not in format_report(report)
    report["counters"] |= {"drafted_tokens": 1000, "accepted_tokens": 250, "saved_steps": 240}
    assert "drafts          1,000 tokens, 25.0% of them right: 240 steps" in format_report(report)


def test_smoke_scale_is_said(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    args = BenchArgs(**SMALL, smoke=True)
    report = bench.run(args, bench.engine_config(args, tmp_path), FakeLLM("t", max_num_seqs=8))
    assert report["notes"][0].startswith("smoke scale: 6 requests")


def test_lost_tokens_stop_the_benchmark(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    fake_llm.lose_tokens = True
    args = BenchArgs(**SMALL)
    with pytest.raises(NanoEngineError, match="request 0 gave"):
        bench.run(args, bench.engine_config(args, tmp_path), FakeLLM("t", max_num_seqs=8))


def test_comparison_with_transformers(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    args = BenchArgs(**SMALL | {"num_requests": 3}, compare="hf", rounds=2)
    report = bench.run(args, bench.engine_config(args, tmp_path), FakeLLM("t", max_num_seqs=8))
    found = report["baseline"]
    slower = max(report["seconds"])
    assert report["requests_per_s"] == pytest.approx(3 / slower)
    assert len(found["seconds"]) == len(report["seconds"]) == 2
    ratios = sorted(b / a for a, b in zip(report["seconds"], found["seconds"], strict=True))
    assert [found["speedup_min"], found["speedup_max"]] == pytest.approx(ratios)
    assert found["speedup_median"] == pytest.approx(sum(ratios) / 2)


def test_rungs_from_the_small_engine_to_the_large_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ladder.json"
    scale = {"num_requests": 4, "input_len": (8, 40), "output_len": (3, 9), "rounds": 2}
    bench.main(BenchArgs(compare="small", json=path, **scale))
    report, text = json.loads(path.read_text()), capsys.readouterr().out
    assert [len(seconds) for seconds in report["seconds"].values()] == [2] * 6
    assert report["output_tokens"] == sum(
        item.max_tokens for item in workload.random_workload(4, (8, 40), (3, 9), seed=0)
    )
    rows = re.findall(r"^\| ([+ \w]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(report["seconds"])
    speeds = [float(speed.replace(",", "")) for _, speed, *_ in rows]
    small = report["output_tokens"] / statistics.median(report["seconds"]["small"])
    assert speeds[0] == pytest.approx(small, abs=1)
    assert [float(over) for *_, over in rows] == pytest.approx([s / small for s in speeds], abs=0.1)


def test_the_small_engine_is_compared_on_a_checkpoint_on_a_cpu() -> None:
    for options, message in (
        ({"shape": "tiny", "load_format": "dummy"}, "leave out --shape"),
        ({"device": "cuda"}, "compares on a CPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench.main(BenchArgs(compare="small", **options))


def test_baseline_is_not_hurt_by_its_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    workload.write_shape("tiny", tmp_path)
    options = {"dummy": True, "dtype": torch.float32, "device": torch.device("cpu")}
    baseline = HFBaseline(str(tmp_path), **options, batch_size=2)
    items = [
        WorkItem(prompt_token_ids=tuple(range(3, 3 + n)), max_tokens=length)
        for n, length in ((4, 5), (9, 2), (6, 7))
    ]
    together = baseline.generate(items, temperature=0.0)
    assert [len(ids) for ids in together] == [5, 2, 7]
    assert together == [baseline.generate([item], temperature=0.0)[0] for item in items]
    assert [len(ids) for ids in baseline.generate(items, temperature=0.6)] == [5, 2, 7]


@pytest.mark.parametrize(
    "name",
    [
        "nanoengine.observe.metrics",
        "nanoengine.observe.trace",
        "nanoengine.observe.simulator",
        "nanoengine.observe.kv_events",
        "nanoengine.cli.workload",
        "nanoengine.cli.draws",
        "loc",
    ],
)
def test_examples_in_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        bench.main(BenchArgs(smoke=True, json=tmp_path / "missing" / "report.json"))
