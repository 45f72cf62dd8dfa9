"""`python bench.py`: its command line, additions to the report, and comparisons."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.suite import limits, main, options, peak
from benchmarks.suite.hf_baseline import Baseline
from benchmarks.suite.peak import Peaks
from benchmarks.suite.shapes import SHAPES, write_shape
from nanoengine import EngineConfig
from nanoengine.bench.throughput import measure
from nanoengine.bench.workload import Scale, WorkOptions, random_workload
from tests.support.fake_llm import MakeLLM
from tests.support.fake_llm import make_llm_fixture as make_llm_fixture

SIZES: dict[str, Any] = {"num_blocks": 200, "max_model_len": 2048}


def config_of(line: str, scratch: Path) -> EngineConfig:
    return main.engine_config(*options.parse(line.split()), scratch)


# --- the command line -----------------------------------------------------------------------------


def test_every_option_of_workload_and_engine_exists_with_its_type(tmp_path: Path) -> None:
    line = (
        "--model m --max-num-seqs 3 --kv-cache-gib 2 --watermark-frac 0.5 --overlap --cpu-isa avx2"
        " --no-enable-prefix-caching --quantization int8 --num-requests 7 --output-len 3 9"
    )
    args, values = options.parse(line.split())
    assert main.work_options(args, values) == WorkOptions(num_requests=7, output_len=(3, 9))
    assert main.engine_config(args, values, tmp_path) == EngineConfig(
        model="m", max_num_seqs=3, kv_cache_gib=2, watermark_frac=0.5, overlap=True,
        cpu_isa="avx2", enable_prefix_caching=False, quantization="int8", skip_tokenizer_init=True,
    )  # fmt: skip
    shown = options.make_parser().format_help()
    assert "--block-size" in shown and "Tokens per KV block, a power of two" in shown
    assert "--kv-tiers" not in shown


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [
        ("tiny", 4_983_552),
        ("small", 99_146_368),
        ("qwen3-0.6b", 596_049_920),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_shapes_equal_configs_of_transformers(
    shape: str, num_parameters: int, tmp_path: Path
) -> None:
    config = config_of(f"--shape {shape} --load-format dummy --dtype bfloat16", tmp_path)
    assert (config.model, config.dtype) == (str(tmp_path), "bfloat16")
    loaded = AutoConfig.from_pretrained(config.model)
    for name, value in SHAPES[shape].items():
        if name == "rope_theta":
            assert loaded.rope_parameters[name] == value
        elif name != "torch_dtype":
            assert getattr(loaded, name) == value
    assert loaded.tie_word_embeddings == SHAPES[shape].get("tie_word_embeddings", True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    assert model.num_parameters() == num_parameters
    assert limits.model_cost(config, 2).head_params == loaded.vocab_size * loaded.hidden_size


# --- comparison with the hardware -----------------------------------------------------------------


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = Peaks(read_gbs=10.0, gemm_gflops=100.0, dtype="float32", by="avx2")
    monkeypatch.setattr(peak, "measure_peaks", lambda *_, **__: peaks)


@pytest.mark.usefixtures("slow_machine")
def test_the_report_has_the_limits_of_the_hardware(tmp_path: Path, make_llm: MakeLLM) -> None:
    write_shape("tiny", tmp_path)
    llm = make_llm(model=str(tmp_path), max_num_seqs=4, **SIZES)
    work = WorkOptions(num_requests=6, input_len=(20, 40), output_len=(3, 9))
    report = limits.with_limits(measure(llm, "tiny", work), llm)
    seconds, found = report["seconds"][0], report["achieved"]
    assert found["bandwidth_frac"] == pytest.approx(found["gbs"] / 10)
    assert found["compute_frac"] == pytest.approx(found["gflops"] / 100)
    roofline = report["roofline"]
    assert roofline["seconds"] >= max(found["gbs"] / 10, found["gflops"] / 100) * seconds * 0.999
    tokens = report["workload"]["output_tokens"]
    assert roofline["output_tokens_per_s"] == pytest.approx(tokens / roofline["seconds"])
    text = limits.format_limits(report)
    assert "of 10.0 measured now\n" in text
    assert f"{roofline['seconds'] / seconds:.0%} of the round: the minimum for these steps" in text
    assert max(map(len, text.splitlines())) <= 100


# --- comparison with transformers -----------------------------------------------------------------


def test_the_report_compares_with_transformers(tmp_path: Path, make_llm: MakeLLM) -> None:
    write_shape("tiny", tmp_path)
    llm = make_llm(model=str(tmp_path), max_num_seqs=8, load_format="dummy", **SIZES)
    work = WorkOptions(num_requests=3, input_len=(20, 40), output_len=(3, 9), rounds=2)
    baseline = Baseline(llm, work.temperature, 32)
    measured = measure(llm, "tiny", work, baseline)
    found, seconds = baseline.compare(measured), measured.report["seconds"]
    assert measured.report["requests_per_s"] == pytest.approx(3 / max(seconds))
    assert len(found["seconds"]) == len(seconds) == 2
    ratios = sorted(b / a for a, b in zip(seconds, found["seconds"], strict=True))
    assert [found["speedup_min"], found["speedup_max"]] == pytest.approx(ratios)
    assert found["speedup_median"] == pytest.approx(sum(ratios) / 2)


# --- comparison with the small engine -------------------------------------------------------------


def test_the_ladder_has_rungs_from_the_small_engine_to_the_large_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ladder.json"
    scale = "--num-requests 4 --input-len 8 40 --output-len 3 9 --rounds 2"
    assert main.main(f"--compare small --json {path} {scale}".split()) == 0
    report, text = json.loads(path.read_text()), capsys.readouterr().out
    assert [len(seconds) for seconds in report["seconds"].values()] == [2] * 6
    items = random_workload(Scale(4, (8, 40), (3, 9)))
    assert report["output_tokens"] == sum(item.max_tokens for item in items)
    rows = re.findall(r"^\| ([+ \w]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(report["seconds"])
    speeds = [float(speed.replace(",", "")) for _, speed, *_ in rows]
    small = report["output_tokens"] / statistics.median(report["seconds"]["small"])
    assert speeds[0] == pytest.approx(small, abs=1)
    assert [float(over) for *_, over in rows] == pytest.approx([s / small for s in speeds], abs=0.1)
