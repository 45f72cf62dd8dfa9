"""Bugs that other engines have had, if they concern several packages. Others are tested with their
package."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nanoengine.attention import make_backend
from nanoengine.build import build_engine
from nanoengine.checkpoint.config import load_model_config
from nanoengine.errors import ConfigError
from nanoengine.kernels.isa import CURRENT
from nanoengine.runner import profile_run
from nanoengine.runner.graphs import capture_sizes
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.runner.profile_run import largest_batches
from nanoengine.runner.sampling.draw import SamplingKind
from nanoengine.runner.transfers import ship
from nanoengine.settings.config import EngineConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens


def test_every_batch_size_is_covered_by_a_graph():
    for max_num_seqs in range(1, 513):
        sizes = capture_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_num_seqs, "a full batch must fit the largest graph"


def test_the_memory_profile_runs_the_largest_step_with_logits(monkeypatch):
    directory = checkpoint("qwen3")
    config = EngineConfig(model=directory, max_num_seqs=24, max_num_batched_tokens=700)
    cpu = torch.device("cpu")
    options = RunnerOptions(
        config=config, model_config=load_model_config(directory), directory=Path(directory),
        device=cpu, dtype=torch.float32, backend="naive",
    )  # fmt: skip
    runner = ModelRunner(options)
    runner.start()
    seen = []
    monkeypatch.setattr(
        "nanoengine.runner.sampling.sampler.Sampler.sample",
        lambda self, logits, rows, _: seen.append((*logits.shape, self.kind(rows))) or _Fetched(),
    )
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda b: seen.append(b.num_tokens) or forward(b))
    with torch.inference_mode():
        for batch in largest_batches(runner._longest_batch(), 700):
            batch.attention = runner.backend.prepare(batch)
            profile_run.run(runner.model, batch, 24)
    sampled = (24, 256, SamplingKind.FILTERED)
    assert seen == [700, sampled, 24, sampled]


class _Fetched:
    def fetch(self):
        return self


def test_two_engines_can_run_in_one_process():
    prompts = random_prompts(3, [5, 20])
    first, second = make_engine(checkpoint("qwen3")), make_engine(checkpoint("llama"))
    expected = [tokens(run(engine, prompts, greedy(8))) for engine in (first, second)]
    requests = [
        [engine.add_request(str(i), prompt, greedy(8)) for i, prompt in enumerate(prompts)]
        for engine in (first, second)
    ]
    while first.has_unfinished():  # alternating steps
        first.step()
        second.step()
    assert [tokens(found) for found in requests] == expected
    first.close()
    assert tokens(run(second, prompts, greedy(8))) == expected[1]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoints_of_every_dtype_load(stored, tmp_path):
    make_checkpoint(tmp_path, "qwen3", dtype=stored)
    engine = build_engine(EngineConfig(model=str(tmp_path), kv_cache_gib=0.01, device="cpu"))
    rounds = stored == torch.bfloat16 and CURRENT.bf16_dots != "generic"
    assert engine.info.dtype == ("bfloat16" if rounds else "float32")
    assert len(tokens(run(engine, random_prompts(1, [5]), greedy(4)))[0][0]) == 4


def test_the_inputs_of_a_step_are_one_nonblocking_transfer(monkeypatch):
    """Uses a device other than a CPU: torch's meta device."""
    allocated = []
    empty = torch.empty

    def counted(*args, pin_memory=False, **options):
        allocated.append(pin_memory)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", counted)
    moves = []
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: moves.append(k) or move(t, *a, **k))
    for count in (40, 30, 7):
        ids, table = np.arange(count), np.zeros((2, count), np.int32)
        sent = ship(torch.device("meta"), ids, table)
        assert [t.shape for t in sent] == [(count,), (2, count)]
        assert [t.dtype for t in sent] == [torch.int64, torch.int32]
    assert moves == [{"non_blocking": True}] * 3
    assert allocated.count(True) == 3


def test_an_unsupported_backend_names_an_alternative():
    with pytest.raises(ConfigError, match="naive"):
        make_backend(
            "cpu", device=torch.device("cpu"), dtype=torch.float16, head_dim=64, block_size=16
        )


def test_the_start_logs_the_selected_backend_and_the_memory_plan(caplog):
    with caplog.at_level("INFO", logger="nanoengine"):
        make_engine(checkpoint("qwen3"), attention_backend="auto", device="cpu")
    assert "float64 on cpu, attention cpu" in caplog.text
    assert "KV cache" in caplog.text
    assert "sequences of 512" in caplog.text
