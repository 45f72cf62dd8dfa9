"""The Triton kernels of layers that keep states give what the plain forms give."""

from __future__ import annotations

import pytest
import torch

from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.delta_rule import CHUNK, DeltaInputs, DeltaTokens, scan
from nanoengine.layers.triton_states import TritonDeltaSteps, conv_step, through_chunks
from nanoengine.models.triton import TritonKernels
from tests.support.attention_cases import DEVICE
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import make_context
from tests.support.states import delta_layer, delta_plan, random_inputs

pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py",
    "nanoengine/layers/causal_conv.py",
    "nanoengine/layers/delta_rule.py",
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(("channels", "bias"), [(6, True), (700, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_convolution_has_the_bits_of_its_twin(channels, bias, dtype):
    """Also where a sequence goes on in the state that it starts from."""
    picked = channels, torch.arange(channels)
    conv = CausalConv(3, channels, bias=bias, picked=picked, context=make_context(dtype))
    torch.manual_seed(0)
    conv.weight.copy_(torch.randn(3, channels))
    if bias:
        conv.bias.copy_(torch.randn(channels))
    states = torch.randn(5, 2 * channels + 7).to(DEVICE)  # rows that hold something else too
    kept = states.clone()
    x = torch.randn(3, channels).to(DEVICE, dtype)
    reads, writes = (torch.tensor(slots).to(DEVICE) for slots in ([1, 0, 4], [2, 3, 4]))
    conv.to(DEVICE).bind(states[:, : 2 * channels])
    expected = conv.step(x, reads, writes)
    conv.bind(kept[:, : 2 * channels])
    assert torch.equal(conv_step(conv, x, reads, writes), expected)
    assert torch.equal(kept, states)


@pytest.mark.parametrize(("heads", "sizes"), [((2, 4), {}), ((1, 1), {"key_dim": 12})])
def test_single_tokens_give_what_plain_steps_give(heads, sizes):
    plan = delta_plan(*heads, **sizes)
    torch.manual_seed(1)
    states = torch.randn(6, plan.size, device=DEVICE)
    layer = delta_layer(plan, torch.float32, states).to(DEVICE)
    qkv = torch.randn(3, plan.channels, device=DEVICE)
    decay, beta = -torch.rand(3, heads[1], device=DEVICE), torch.rand(3, heads[1], device=DEVICE)
    reads, writes = (torch.tensor(slots).to(DEVICE) for slots in ([1, 0, 4], [2, 3, 4]))
    kept = states.clone()
    tokens = DeltaTokens(qkv, decay, beta, states, reads, writes)
    expected = layer.steps(tokens)
    layer.bind(kept)
    steps = TritonDeltaSteps(plan, layer.conv1d)
    torch.testing.assert_close(steps(tokens._replace(states=kept)), expected, **CLOSE)
    torch.testing.assert_close(kept, states, **CLOSE)


@pytest.mark.parametrize(("count", "position"), [(5, 0), (CHUNK + 9, CHUNK - 3)])
def test_chunks_give_what_plain_chunks_give(count, position):
    inputs = DeltaInputs(*(x.float().to(DEVICE) for x in random_inputs(count, value=40)))
    state = torch.randn(3, 8, 40).to(DEVICE)
    expected, found = (scan(inputs, state, position, *how) for how in ((), (through_chunks,)))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_model_runs_by_them(family):
    options = {"block_size": 8, "num_kv_blocks": 40, "dtype": "float32", "max_model_len": 64}
    one, two = (make_engine(checkpoint(family), **options) for _ in range(2))
    TritonKernels(two.executor.backend, dtype=torch.float32).fuse(two.executor.model)
    prompts = random_prompts(2, [9, 20])
    assert tokens(run(two, prompts, greedy(4))) == tokens(run(one, prompts, greedy(4)))
