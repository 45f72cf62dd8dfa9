"""The Triton kernels of Mamba layers match their reference implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.checkpoint.config import load_model_config
from nanoengine.layers.triton_mamba import TritonMamba
from nanoengine.models.mamba import MambaMixer
from tests.layers.test_triton_linear_attention import SPANS, wave_of
from tests.support.attention_cases import DEVICE
from tests.support.engines import checkpoint
from tests.support.model_helpers import make_context

pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py",
    "nanoengine/layers/mamba2.py",
    "nanoengine/models/mamba.py",
)

CLOSE = {"rtol": 1e-5, "atol": 2e-5}
HEADS, VALUE = 6, 20


def layer_and_kernel(groups: int, dtype: torch.dtype = torch.float32, **changes) -> tuple:
    """A layer with random weights over 9 random states, and its kernels."""
    config, key = load_model_config(checkpoint("bamba")), changes.pop("key_dim", 12)
    plan = replace(
        config.states, num_key_heads=groups, num_value_heads=HEADS, key_dim=key, value_dim=VALUE,
        channels=HEADS * VALUE + 2 * groups * key, **changes,
    )  # fmt: skip
    torch.manual_seed(1)
    mixer = MambaMixer("layer", replace(config, states=plan), make_context(dtype))
    for parameter in mixer.parameters():
        parameter.data.normal_()
    mixer = mixer.to(DEVICE)
    mixer.bind(torch.randn(9, plan.size, device=DEVICE))
    return mixer, TritonMamba(mixer)


def random_steps(mixer: MambaMixer, count: int) -> list[torch.Tensor]:
    xbc = torch.randn(count, mixer.plan.channels, device=DEVICE)
    dt = torch.rand(count, HEADS, device=DEVICE)
    return [xbc, dt, -dt * torch.rand(HEADS, device=DEVICE)]


@pytest.mark.parametrize(("groups", "key_dim"), [(1, 12), (3, 16)])
def test_decodes_match_the_reference(groups, key_dim):
    mixer, kernel = layer_and_kernel(groups, key_dim=key_dim)
    states_copy = mixer.flat_states.clone()
    reads, writes = (torch.tensor(slots).to(DEVICE) for slots in ([1, 0, 4], [2, 3, 4]))
    tokens = *random_steps(mixer, 3), reads, writes
    expected, states = mixer.decode(*tokens), mixer.flat_states
    mixer.bind(states_copy)
    torch.testing.assert_close(kernel.step(*tokens), expected, **CLOSE)
    torch.testing.assert_close(states_copy, states, **CLOSE)


@pytest.mark.parametrize(("groups", "key_dim"), [(1, 12), (3, 24)])
def test_prefills_match_the_reference(groups, key_dim):
    """Several sequences at once, with sizes that fill no tile."""
    mixer, kernel = layer_and_kernel(groups, key_dim=key_dim)
    states_copy, shape = mixer.flat_states.clone(), (86, HEADS, VALUE)
    expected, found = (torch.full(shape, 7.0, device=DEVICE) for _ in range(2))
    spans = *random_steps(mixer, 86), wave_of(SPANS)
    mixer.prefill(*spans, expected)
    states = mixer.flat_states
    mixer.bind(states_copy)
    kernel.scan(*spans, found)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(states_copy, states, **CLOSE)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 0.9)])
def test_gates_match_torch(limits):
    """Strided rows; one step size is nearly zero and one is large."""
    mixer, kernel = layer_and_kernel(2, time_step_limits=limits)
    mixer.heads.dt_bias[:3] = torch.tensor([-30.0, 0.5, 90.0])
    for dtype in (torch.float32, torch.float16):
        raw = torch.randn(5, 40).to(DEVICE, dtype)[:, 7 : 7 + HEADS]
        torch.testing.assert_close(kernel.gates(raw), mixer.heads(raw), **CLOSE)


@pytest.mark.parametrize("norm", ["after_gate", "before_gate", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_and_norms_in_either_order_match_torch(norm, dtype):
    mixer, kernel = layer_and_kernel(2, dtype, norm=norm)
    x = torch.randn(5, HEADS * VALUE, device=DEVICE)
    z = torch.randn(5, 200).to(DEVICE, dtype)[:, 30 : 30 + HEADS * VALUE]
    found = kernel.gate_and_norm(x, z)
    assert found.dtype == dtype
    close = CLOSE if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(found, mixer.gate_and_norm(x, z), **close)


def test_padding_writes_nothing():
    """Slot 0 has the zero state from which sequences start."""
    mixer, kernel = layer_and_kernel(2)
    mixer.flat_states.zero_()
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    kernel.step(*random_steps(mixer, 2), slots, slots)
    assert not mixer.flat_states.any()
