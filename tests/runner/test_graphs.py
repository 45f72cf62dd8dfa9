"""GraphedDecode and DecodeStep: on the CPU, and in CUDA graphs of an emulated GPU."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch

import nanoengine.runner.decode_step as decode_step
import nanoengine.runner.start as runner_start
from nanoengine.core.plan import AdmittedSequence, StepPlan, TableUpdate
from nanoengine.runner.decode_step import DecodeStep
from nanoengine.runner.graphs import CudaGraphs, GraphedDecode, capture_sizes
from nanoengine.runner.input_batch import InputBatch
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.sampling.draw import SamplingKind
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.settings.params import SamplingParams
from tests.support.emulated_gpu import CUDA, EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.late_device import make_graph_safe

VOCAB = 40
BLOCK = 4


@pytest.mark.parametrize(
    "limit", [1, 2, 3, 4, 7, 8, 9, 100, 255, 256, 257, 271, 272, 273, 500, 512]
)
def test_capture_sizes_cover_every_batch_up_to_the_limit(limit):
    sizes = capture_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == limit
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller <= (8 if size <= 256 else 16)


def test_capture_sizes_are_dense_for_small_batches():
    assert capture_sizes(300)[:7] == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(300)[-4:] == [256, 272, 288, 300]


def test_the_runner_makes_its_gpu_the_current_device(monkeypatch):
    """Triton and graphs use the current device and cannot access another device's memory."""
    current = ["cuda:0"]

    @contextlib.contextmanager
    def device(new):
        current.append(str(new))
        try:
            yield
        finally:
            current.pop()

    def note(*plan):
        seen.append((current[-1], torch.is_inference_mode_enabled()))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device", device)
    seen = []
    for name in ("cuda:1", "cpu"):
        as_current = runner_start.current_device(torch.device(name))
        runner = mock.Mock(as_current=as_current, _start=note, _update_batch=note, due=[])
        with pytest.raises(InterruptedError):
            ModelRunner.start(runner)
        with pytest.raises(InterruptedError):
            ModelRunner.launch(runner, StepPlan(step=0))
    assert seen == [("cuda:1", True)] * 2 + [("cuda:0", True)] * 2
    assert current == ["cuda:0"]


def test_all_captures_warm_up_and_record_on_one_stream():
    """Each further stream that cuBLAS uses keeps a workspace permanently."""
    with EmulatedGPU() as gpu:
        before = len(gpu.streams)
        for _ in range(2):
            graphs = CudaGraphs()
            for number in range(3):
                assert graphs.capture(lambda number=number: (number,))[1] == (number,)
        assert len(gpu.streams) == before + 1


# --- the decode step with a model that records its inputs ----------------------------------------


class Model:
    """The next token is (token + position + first block) % VOCAB; the cache records the writes."""

    def __init__(self, num_groups=1, num_slots=4096, device="cpu"):
        self.cache = torch.zeros(num_groups, num_slots, dtype=torch.int64, device=device)
        self.prepared, self.lm_head = [], self

    def prepare(self, batch):
        self.prepared.append(batch)
        return "prepared"

    def __call__(self, batch):
        assert batch.attention == "prepared"
        assert batch.logits_indices is None, "all rows have logits, so none are selected"
        written = batch.token_ids.expand_as(batch.slot_mapping)
        self.cache.scatter_(1, batch.slot_mapping, written)
        assert batch.num_decodes == batch.num_tokens == batch.num_seqs
        first = batch.block_tables[0, :, 0]
        return torch.stack((batch.token_ids, batch.positions, batch.seq_lens - 1, first), 1)

    def logits(self, hidden):
        tokens, positions, before, first = hidden.unbind(1)
        best = (tokens + positions + first) % VOCAB
        ids = torch.arange(VOCAB, device=hidden.device)
        # A wrong `seq_lens` gives NaN.
        poison = torch.where(positions == before, 0.0, torch.nan)[:, None]
        return -((ids - best[:, None]) ** 2).double() + poison


def make_step(max_num_seqs=8, num_groups=1, device="cpu"):
    device = torch.device(device)
    input_batch = InputBatch(
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        block_size=BLOCK,
        num_groups=num_groups,
        device=device,
    )
    model, sampler = Model(num_groups, device=device), Sampler(VOCAB, max_num_seqs)
    return (
        model,
        input_batch,
        sampler,
        DecodeStep(model, model, input_batch, sampler, torch.float64),
    )


def eager(step, size, kind):
    """The step without a graph; without a kind it stops at the logits."""
    logits = step.forward(size)
    return logits if kind is None else step.sample(size, kind)


def admit(input_batch, sampler, step, *new):
    """Admits sequences with all tokens but the last computed: (row, tokens, blocks, parameters)."""
    plan = StepPlan(step=0)
    for row, token_ids, blocks, params in new:
        plan.admitted.append(
            AdmittedSequence(row, row, token_ids, 1, len(token_ids) - 1, params, 5 + row)
        )
        for group in range(len(input_batch.block_tables)):
            ids = tuple(block + group for block in blocks)
            plan.table_updates.append(TableUpdate(row, group, 0, ids))
        sampler.admit(plan.admitted[-1])
    input_batch.update(plan)
    step.update(plan)


def decodes(*entries):
    """A plan in which each (row, start) computes one token."""
    plan = StepPlan(step=1)
    for row, start in entries:
        plan.rows.append(row)
        plan.starts.append(start)
        plan.num_scheduled_tokens.append(1)
        plan.num_logits.append(1)
    return plan


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_padded_replay_equals_the_eager_step(num_groups):
    with EmulatedGPU() as gpu, torch.inference_mode():
        model, input_batch, sampler, step = make_step(num_groups=num_groups, device=CUDA)
        graphed = GraphedDecode(step, CudaGraphs())
        graphed.capture(graphed.sizes)
        new = [(r, [3 * r + 1] * (2 + 3 * r), range(10 * r + 10, 10 * r + 20), GREEDY)
               for r in range(5)]  # fmt: skip
        admit(input_batch, sampler, step, *new)
        plain_model, plain_batch, plain_sampler, plain_step = make_step(num_groups=num_groups)
        admit(plain_batch, plain_sampler, plain_step, *new)
        for count, later in ((5, 0), (5, 1), (3, 2), (1, 3)):
            plan = decodes(*((r, 1 + 3 * r + later) for r in range(count)))
            size = graphed.size_for(count)
            assert size >= count
            step.load(plan, size)
            token_ids, valid = graphed(size, SamplingKind.GREEDY)
            plain_step.load(plan, count)
            expected, _ = eager(plain_step, count, SamplingKind.GREEDY)
            assert token_ids[:count].tolist() == expected.tolist()
            assert valid.all()
            assert torch.equal(model.cache.cpu()[:, BLOCK:], plain_model.cache[:, BLOCK:])
            assert input_batch.pool.tolist() == plain_batch.pool.tolist()
            assert (
                step.device_batch.next_positions.tolist()
                == plain_step.device_batch.next_positions.tolist()
            )
        assert input_batch.pool[-1] == step.device_batch.next_positions[-1] == 0, (
            "the padding row is unchanged"
        )
        assert gpu.num_replayed == 2 * 4, "the forward, then the sampling"
        # Four decodes of row 0, from position 1: token + position + first block, repeated.
        token = 1
        for position in range(1, 5):
            token = (token + position + 10) % VOCAB
        assert input_batch.pool[0] == token


def test_padding_writes_only_the_null_block():
    with torch.inference_mode():
        model, input_batch, sampler, step = make_step()
        admit(input_batch, sampler, step, (0, [7, 8], (5, 6), GREEDY), (1, [7, 9], (8, 9), GREEDY))
        step.load(decodes((0, 1), (1, 1)), 2)
        eager(step, 2, SamplingKind.GREEDY)
        cache = model.cache.clone()
        step.load(
            decodes((1, 2)), 4
        )  # row 0 has finished; its position in the batch is padding now
        eager(step, 4, SamplingKind.GREEDY)
        batch = model.prepared[-1]
        assert batch.slot_mapping.tolist() == [[8 * BLOCK + 2, 0, 0, 0]]
        assert batch.seq_lens.tolist() == [3, 1, 1, 1]
        assert batch.block_tables[0, 1:].abs().max() == 0
        cache[0, 8 * BLOCK + 2], cache[0, 0] = model.cache[0, 8 * BLOCK + 2], 0
        assert torch.equal(model.cache, cache)


def test_only_changes_are_uploaded(monkeypatch):
    shipped = []

    def recording_ship(device, *arrays):
        shipped.append([array.size for array in arrays])
        return ship(device, *arrays)

    ship = decode_step.ship
    monkeypatch.setattr(decode_step, "ship", recording_ship)
    with torch.inference_mode():
        _, input_batch, sampler, step = make_step()
        admit(input_batch, sampler, step, (0, [7, 8], (5, 6), GREEDY), (1, [7, 9], (8, 9), GREEDY))
        for later in range(3):
            step.load(decodes((0, 1 + later), (1, 1 + later)), 2)
            eager(step, 2, SamplingKind.GREEDY)
        # Rows, 2 positions, 2 tokens, 4 table entries, 2 x 4 parameters, 2 seeds; then nothing.
        assert shipped == [[2, 2, 2, 2, 2, 4, 4, 2, 8, 2, 2]]
        grown = decodes((0, 4), (1, 4))
        grown.table_updates.append(TableUpdate(1, 0, 2, (11,)))
        input_batch.update(grown)
        step.update(grown)
        step.load(grown, 2)
        assert shipped[1:] == [[2, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]]
        assert step.device_batch.tables[0, 1, :3].tolist() == [8, 9, 11]


def test_after_a_failed_step_all_inputs_are_uploaded_again():
    with torch.inference_mode():
        _, input_batch, sampler, step = make_step()
        admit(input_batch, sampler, step, (0, [7, 8], (5, 6), GREEDY))
        step.load(decodes((0, 1)), 1)  # but the step does not run
        again = StepPlan(step=2, released=list(range(8)))
        input_batch.update(again)
        step.update(again)
        admit(input_batch, sampler, step, (0, [1, 2, 3], (5, 6), GREEDY))
        step.load(decodes((0, 2)), 1)
        assert step.device_batch.next_positions[0] == 2
        assert input_batch.pool[0] == 3


# --- the whole runner, with torch attention -------------------------------------------------------


def graphed_engine(**options):
    """An engine with graphed decodes, in float64 and without Triton's slow interpreter."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
    defaults |= {"num_kv_blocks": 60, "dtype": "float64", "attention_backend": "naive"}
    with mock.patch.object(runner_start, "make_backend", make_graph_safe):
        return make_engine(checkpoint("qwen3"), device="cuda", **defaults | options)


@functools.cache
def plain(params, lengths):
    engine = make_engine(
        checkpoint("qwen3"), max_num_seqs=4, max_model_len=128, dtype="float64",
        attention_backend="naive",
    )  # fmt: skip
    return tokens(run(engine, random_prompts(len(lengths), lengths), params))


LENGTHS = (1, 7, 16, 33, 20, 5)
PARAMS = {
    "greedy": greedy(12),
    "drawn": SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True),
    "top_k": SamplingParams(top_k=20, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
    "filtered": SamplingParams(min_p=0.05, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
    "edited": SamplingParams(
        temperature=0, repetition_penalty=1.3, max_tokens=12, min_tokens=4, logprobs=2
    ),
    "forked": SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
}


def close(gpu, engine):
    """Closes an engine; checks that it has replayed decodes, without unordered accesses."""
    engine.close()
    assert gpu.num_replayed > 10
    assert not gpu.disorder


@pytest.mark.parametrize(
    ("name", "overlap"), [("greedy", False), *((name, True) for name in PARAMS)]
)
def test_replayed_decodes_give_the_tokens_of_eager_ones(name, overlap):
    expected = plain(PARAMS[name], LENGTHS)
    with EmulatedGPU() as gpu:
        engine = graphed_engine(overlap=overlap)
        found = run(engine, random_prompts(len(LENGTHS), LENGTHS), PARAMS[name])
        assert tokens(found) == expected
        captured = engine.executor.graphed._captured
        assert len(captured) == len(capture_sizes(4)) * (1 + len(SamplingKind))
        close(gpu, engine)


def test_a_batch_may_mix_sampling_kinds():
    names = ["greedy", "drawn", "top_k", "filtered"]
    expected = [plain(PARAMS[name], (9,))[0] for name in names]
    prompts = random_prompts(1, [9]) * 4
    with EmulatedGPU() as gpu:
        engine = graphed_engine(overlap=True)
        assert tokens(run(engine, prompts, [PARAMS[name] for name in names])) == expected
        close(gpu, engine)
