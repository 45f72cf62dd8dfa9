"""GraphedForward on the CPU: sizes, padding and reuse, with a stand-in that records and replays."""

import itertools

import pytest
import torch

from nanoengine.attention.naive import NaiveBackend
from nanoengine.runner.batch import Batch
from nanoengine.runner.cuda_graph import GraphedForward, capture_sizes
from tests.attention_cases import DEVICE, make_case


@pytest.fixture(autouse=True)
def inference():
    """As in the engine, whose steps all run so."""
    with torch.inference_mode():
        yield


class FakeGraphs:
    """Replays by calling the function again into the same output: what a graph does."""

    def __init__(self):
        self.replayed = []

    def capture(self, function):
        output = function()
        size = output.shape[0]

        def replay():
            self.replayed.append(size)
            output.copy_(function())

        return replay, output


class Model:
    """Hidden states tell what each token's row of the batch was; the cache tells what it wrote."""

    def __init__(self, num_groups=1, num_slots=4096):
        self.cache = torch.zeros(num_groups, num_slots, dtype=torch.int64)
        self.batches = []

    def __call__(self, batch):
        assert batch.attention == ("prepared", batch.num_tokens)
        self.batches.append(batch)
        self.cache.scatter_(1, batch.slot_mapping, batch.token_ids.expand_as(batch.slot_mapping))
        rows = torch.repeat_interleave(
            torch.arange(batch.num_seqs), batch.query_start_loc.diff().long()
        )
        columns = [batch.token_ids, batch.positions, batch.seq_lens[rows]]
        columns += [batch.block_tables[g, rows, 0] for g in range(batch.block_tables.shape[0])]
        return torch.stack([c.double() for c in columns], 1)


def prepare(batch):
    return ("prepared", batch.num_tokens)


def decodes(count, num_groups=1, first=1, max_blocks=2):
    """`count` sequences with one query token each, all their numbers different."""
    number = torch.arange(first, first + count)
    group = torch.arange(num_groups)[:, None]
    batch = Batch(
        token_ids=100 + number,
        positions=15 + number,
        slot_mapping=number * 16 + group,
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=(16 + number).int(),
        block_tables=(number + 1000 * group).int()[:, :, None].repeat(1, 1, max_blocks),
        logits_indices=torch.arange(count),
        num_decodes=count,
        max_query_len=1,
        max_seq_len=16 + first + count,
    )
    batch.attention = prepare(batch)
    return batch


def graphed(model, graphs, max_num_seqs=20, num_groups=1):
    return GraphedForward(
        model,
        prepare,
        num_groups=num_groups,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        block_size=16,
        device=torch.device("cpu"),
        graphs=graphs,
    )


@pytest.mark.parametrize(
    "limit", [1, 2, 3, 4, 7, 8, 9, 100, 255, 256, 257, 271, 272, 273, 500, 512]
)
def test_sizes_cover_every_batch_and_never_more(limit):
    sizes = capture_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == limit
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller <= (8 if size <= 256 else 16)


def test_sizes_are_dense_where_batches_are_small():
    assert capture_sizes(300)[:7] == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(300)[-4:] == [256, 272, 288, 300]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 19, 20])
def test_a_padded_replay_gives_the_eager_result(count, num_groups):
    model, eager, graphs = Model(num_groups), Model(num_groups), FakeGraphs()
    forward = graphed(model, graphs, num_groups=num_groups)
    batch = decodes(count, num_groups)
    hidden = forward(batch)
    assert hidden.tolist() == eager(batch).tolist()
    assert graphs.replayed == [next(s for s in capture_sizes(20) if s >= count)]
    assert torch.equal(model.cache[:, 16:], eager.cache[:, 16:])


def test_padding_rows_live_in_the_null_block():
    model = Model()
    graphs = FakeGraphs()
    forward = graphed(model, graphs)
    forward(decodes(8, first=30))
    cache = model.cache.clone()
    forward(decodes(5, first=1))
    batch = model.batches[-1]
    assert batch.num_tokens == 8
    assert batch.slot_mapping[:, 5:].tolist() == [[0, 0, 0]]
    assert batch.seq_lens[5:].tolist() == [1, 1, 1]
    assert batch.positions[5:].tolist() == [0, 0, 0]
    assert batch.block_tables[0, 5:].abs().max() == 0
    # Rows 5..7 of the step before wrote slots 35 * 16 and on; nobody writes there again.
    assert torch.equal(model.cache[:, 16 * 30 :], cache[:, 16 * 30 :])


def test_any_longer_query_runs_eagerly():
    model, graphs = Model(), FakeGraphs()
    forward = graphed(model, graphs)
    batch = decodes(3)
    batch.query_start_loc = torch.tensor([0, 1, 3], dtype=torch.int32)
    batch.seq_lens, batch.num_decodes, batch.max_query_len = batch.seq_lens[:2], 1, 2
    forward(batch)
    assert model.batches[-1] is batch
    assert graphs.replayed == []


def test_graphs_are_captured_largest_first_for_the_longest_sequences():
    model = Model()
    graphed(model, FakeGraphs())
    assert [batch.num_tokens for batch in model.batches] == capture_sizes(20)[::-1]
    assert {batch.max_seq_len for batch in model.batches} == {64}
    assert {batch.block_tables.shape[2] for batch in model.batches} == {4}


def test_attention_over_a_padded_batch():
    case = make_case((1, 20), (1, 33), (1, 7))
    backend = NaiveBackend(device=DEVICE, dtype=torch.float32, head_dim=64, block_size=16)
    table = torch.cat([case.q, case.k, case.v], 1)

    def attend(batch):
        q, k, v = table[batch.token_ids].split(1, 1)
        return backend.forward(q, k, v, case.k_cache, case.v_cache, batch, case.spec)

    case.batch.token_ids = torch.arange(3, device=DEVICE)
    expected = case.run(backend)
    forward = GraphedForward(
        attend, backend.prepare, num_groups=2, max_num_seqs=8, max_model_len=64, block_size=16,
        device=DEVICE, graphs=FakeGraphs(),
    )  # fmt: skip
    assert torch.equal(forward(case.batch), expected)
