"""`bench.py --ablate`: each switch has its effect, and outputs that must be equal are equal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.suite import ablate, main
from benchmarks.suite.ablate import PhasesApart, Switch
from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.checks import check
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepResult
from nanoengine.core.sequence import Request
from nanoengine.layers.layer import pin_attributes

SCALE = ["--num-requests", "4", "--input-len", "20", "60", "--output-len", "3", "9"]
CHOSEN = ("prefix cache", "mixed steps", "fused layer", "screened head")


@pytest.fixture
def few_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why few: each one loads a model."""
    every = ablate.switches

    def chosen(config: EngineConfig, info: object) -> list[Switch]:
        return [switch for switch in every(config, info) if switch.name in CHOSEN]

    monkeypatch.setattr(ablate, "switches", chosen)


@pytest.mark.usefixtures("few_switches")
def test_each_switch_alternates_with_the_base_and_keeps_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ablation.json"
    shared = ["--dataset", "shared-prefix", "--prefix-len", "64", "--rounds", "2"]
    assert main.main(["--ablate", *SCALE, *shared, "--json", str(path)]) == 0
    report, text = json.loads(path.read_text()), capsys.readouterr().out
    assert report["greedy"]
    assert report["dtype"] == "float32"
    by_name = {switch["name"]: switch for switch in report["switches"]}
    assert tuple(by_name) == CHOSEN
    assert "smaller than 16 MiB" in by_name.pop("screened head")["skipped"]
    for switch in by_name.values():
        assert len(switch["seconds"]) == len(switch["base_seconds"]) == 2
        assert switch["compared_requests"] == 8
        assert switch["different_requests"] == 0
    rows = re.findall(r"^\| (\w[\w ]+) \| ([\w ]+) \| [\d,]+ \| ([\d.]+) \(.*equal \|$", text, re.M)
    assert [name for name, *_ in rows] == list(by_name)
    for name, _, ratio in rows:
        ratios = ablate.ratios_of(by_name[name])
        assert float(ratio) == pytest.approx(sum(ratios) / 2, abs=0.01)


def test_every_performance_feature_has_a_switch() -> None:
    config = EngineConfig(model=str(demo_model_path()), num_kv_blocks=40, block_size=64)
    with LLM(demo_model_path(), num_kv_blocks=40) as llm:
        on_cpu = list(ablate.switches(config, llm.info))
        assert ablate.unfuse(llm) == ""
        assert "no layer" in ablate.unfuse(llm), "it is out already"
    names = [switch.name for switch in on_cpu]
    assert names.count("block size") == 2
    assert {"chunked prefill", "batching", "admission", "attention backend"} <= set(names)
    assert [s.same_tokens for s in on_cpu if s.name == "quantization"] == [False, False]
    sizes = [s.options for s in on_cpu if s.name == "block size"]
    assert [o["block_size"] * (o["num_kv_blocks"] - 1) for o in sizes] == [2496, 2304]
    gpu = SimpleNamespace(device="cuda:0", block_size=16)
    by_name = {s.name: s.options for s in ablate.switches(EngineConfig(model="m"), gpu)}
    assert (by_name["graphs"], by_name["overlap"]) == ({"enforce_eager": True}, {"overlap": False})
    assert "fused layer" not in by_name
    assert by_name["block size"] == {"block_size": 64}, "its bytes are given elsewhere"


def test_a_removed_argmax_bound_is_removed_even_with_pinned_buffers() -> None:
    head = torch.nn.Module()
    head.register_buffer("values", torch.zeros(1))
    pin_attributes(head)
    model = SimpleNamespace(lm_head=SimpleNamespace(method=head))
    llm = SimpleNamespace(engine=SimpleNamespace(executor=SimpleNamespace(model=model)))
    assert ablate.drop_screen(llm) == ""
    assert head.values is None


def make_apart(num_blocks: int) -> PhasesApart:
    layout = KVLayout(
        num_blocks=num_blocks, block_size=8, block_bytes=1, groups=(KVGroup(layers=(0,)),)
    )
    return PhasesApart(BlockManager(layout), max_num_seqs=4, max_num_batched_tokens=16)


@pytest.mark.parametrize("num_blocks", [64, 14])  # the smaller pool preempts
def test_separate_phases_mix_no_step_and_finish_all_requests(num_blocks: int) -> None:
    scheduler = make_apart(num_blocks)
    for number, length in enumerate((30, 5, 40, 12, 21)):
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        prompt = [number * 50 + i for i in range(length)]
        request = Request(str(number), prompt, params, arrival=number, max_num_tokens=length + 20)
        scheduler.add(request)
    finished, kinds, preempted = [], set(), 0
    known: dict[int, int] = {}
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        known |= {new.row: len(new.token_ids) for new in plan.admitted}
        rows = list(zip(plan.rows, plan.starts, plan.num_scheduled_tokens, strict=True))
        has_decodes = any(start >= known[row] for row, start, _ in rows)
        has_prompts = any(count > 1 for _, _, count in rows)
        assert has_decodes + has_prompts < 2
        kinds |= {(has_decodes, has_prompts)}
        preempted += len(plan.preempted)
        tokens = [[1] if logits else [] for logits in plan.num_logits]
        finished += scheduler.commit(plan, StepResult(token_ids=tokens))
        check(scheduler)
    assert {(True, False), (False, True)} <= kinds
    assert bool(preempted) == (num_blocks == 14)
    assert sorted(request.request_id for request in finished) == list("01234")
    assert all(len(r.sequences[0].output_token_ids) == 20 for r in finished)
