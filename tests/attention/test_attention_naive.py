"""The naive backend against torch's attention on each sequence's dense tensors."""

import pytest
import torch
import torch.nn.functional as F

from nanoengine.attention import make_backend
from tests.support.attention_cases import CPU, Paged

LENGTHS = [(1, 1), (1, 16), (1, 33), (5, 5), (3, 40), (17, 32)]


def dense_attention(paged: Paged) -> torch.Tensor:
    """torch's own attention per sequence, with an explicit mask."""
    heads, k_heads, window = paged.spec.num_heads, paged.num_kv_heads, paged.sliding_window
    outputs = []
    for numbers, (query_len, seq_len) in zip(paged.dense, paged.lengths, strict=True):
        q, k, v = numbers.transpose(0, 1).split([heads, k_heads, k_heads])
        distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)[None, :]
        mask = (distance >= 0) & (distance < (window or seq_len))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        outputs.append(out.transpose(0, 1)[seq_len - query_len :])
    return torch.cat(outputs)


@pytest.mark.parametrize("group_size", [1, 2, 7])
@pytest.mark.parametrize("sliding_window", [None, 1, 9])
def test_equals_dense_attention(group_size, sliding_window):
    paged = Paged(lengths=LENGTHS, group_size=group_size, sliding_window=sliding_window)
    torch.testing.assert_close(paged.run("naive"), dense_attention(paged), rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_any_block_size_and_head_dim(block_size, head_dim):
    paged = Paged(lengths=LENGTHS, block_size=block_size, head_dim=head_dim)
    torch.testing.assert_close(paged.run("naive"), dense_attention(paged), rtol=0, atol=1e-12)


def test_softcap_limits_the_scores():
    paged = Paged(lengths=[(2, 2)], num_kv_heads=1, group_size=1, softcap=0.5)
    q, k, v = (x[:, 0] for x in paged.qkv())
    scores = 0.5 * torch.tanh(q[1] @ k.T * paged.spec.scale / 0.5)
    expected = torch.stack([v[0], scores.softmax(0) @ v])
    torch.testing.assert_close(paged.run("naive")[:, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_a_sink_adds_to_the_sum_of_the_softmax(sliding_window):
    """A sink equals one more key that every query attends to and whose value is 0."""
    paged = Paged(lengths=LENGTHS, sinks=3.0, sliding_window=sliding_window)
    heads, k_heads, outputs = paged.spec.num_heads, paged.num_kv_heads, []
    for numbers, (query_len, seq_len) in zip(paged.dense, paged.lengths, strict=True):
        q, k, v = numbers.transpose(0, 1).split([heads, k_heads, k_heads])
        k, v = (x.repeat_interleave(heads // k_heads, 0) for x in (k, v))
        distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)[None, :]
        hidden = (distance < 0) | (distance >= (sliding_window or seq_len))
        scores = (q @ k.mT * paged.spec.scale).masked_fill(hidden, -torch.inf)
        sums = scores.exp().sum(-1, keepdim=True) + paged.spec.sinks.exp().view(-1, 1, 1)
        out = scores.exp() / sums @ v
        outputs.append(out.transpose(0, 1)[seq_len - query_len :])
    torch.testing.assert_close(paged.run("naive"), torch.cat(outputs), rtol=0, atol=1e-12)


def test_reads_blocks_that_another_sequence_writes_in_the_same_step():
    paged = Paged(lengths=[(3, 35), (32, 32)], shared={})
    late = Paged(lengths=[(32, 32), (3, 35)], shared={1: (0, 2)})
    assert not torch.equal(paged.batch.block_tables[1, 0, :2], paged.batch.block_tables[1, 1, :2])
    torch.testing.assert_close(late.run("naive"), dense_attention(late), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_scores_are_computed_in_float32(dtype):
    paged = Paged(lengths=LENGTHS, dtype=dtype)
    exact = Paged(lengths=LENGTHS)
    out = paged.run("naive")
    assert out.dtype == dtype
    # Inputs and output are rounded to the dtype once: a few epsilons at values near 1.
    torch.testing.assert_close(
        out.double(), exact.run("naive"), rtol=0, atol=8 * torch.finfo(dtype).eps
    )


def test_keeps_no_state_between_steps():
    backend = make_backend("naive", device=CPU, dtype=torch.float64, head_dim=64, block_size=16)
    first, second = Paged(lengths=[(1, 20)]), Paged(lengths=[(4, 9), (2, 2)])
    prepared = backend.prepare(first.batch), backend.prepare(second.batch)
    assert prepared == ([(0, 1, 20)], [(0, 4, 9), (4, 6, 2)])
