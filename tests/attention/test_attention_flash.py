"""FlashAttnBackend against the documented signatures of flash-attn, computed in plain torch.

The fakes check what the packages check (block size, int32, contiguity) and use the packages'
argument names and defaults, so wrong names, windows or lengths fail here.
"""

import sys
import types
from dataclasses import replace

import pytest
import torch

from nanoengine.attention.base import LayerCache
from nanoengine.attention.flash import FlashAttnBackend
from nanoengine.checkpoint.config import load_model_config
from nanoengine.errors import ConfigError, MissingDependencyError
from nanoengine.layers.kernels import Kernels
from nanoengine.models.generic import GenericAttention
from tests.support.attention_cases import make_case
from tests.support.engines import checkpoint
from tests.support.model_helpers import make_context

OPTIONS = {
    "device": torch.device("cuda"), "dtype": torch.float16, "head_dim": 64, "block_size": 256,
}  # fmt: skip


def attend(q, keys, values, scale, causal, window_size, softcap):
    """One sequence; queries are aligned to the end of the keys, as flash-attn documents."""
    group = q.shape[1] // keys.shape[1]
    q, keys, values = q.double(), keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(q.shape[0], device=q.device)[:, None] + keys.shape[0] - q.shape[0]
    key = torch.arange(keys.shape[0], device=q.device)[None, :]
    left, right = window_size
    right = 0 if causal else right
    visible = torch.ones_like(query - key, dtype=torch.bool)
    if left >= 0:
        visible &= key >= query - left
    if right >= 0:
        visible &= key <= query + right
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def paged(q, k_cache, v_cache, starts, lengths, table, multiple, *rest):
    """All sequences, with keys gathered by the block table."""
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert table.dtype == lengths.dtype == torch.int32
    assert table.stride(-1) == q.stride(-1) == k_cache.stride(-1) == 1
    assert k_cache.shape[1] % multiple == 0
    out = torch.empty_like(q)
    for i, length in enumerate(lengths.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = table[i, : -(-length // k_cache.shape[1])].long()
        keys, values = (c[blocks].flatten(0, 1)[:length] for c in (k_cache, v_cache))
        out[rows] = attend(q[rows], keys, values, *rest).to(q.dtype)
    return out


def fake_flash_attn_2(calls):
    """As in 2.8.4. Earlier versions have the same signatures; the second function never syncs."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append("varlen")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k >= lengths.max()
        return paged(
            q, k, v, cu_seqlens_q.tolist(), lengths, block_table, 256,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip

    def flash_attn_with_kvcache(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing: item()")

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fake_flash_attn_3(calls):
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        calls.append("kvcache 3")
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        window_and_cap = (*window_size, softcap > 0.0)
        assert scheduler_metadata is None or scheduler_metadata.arguments == (
            len(cache_seqlens), max_seqlen_q, page_table.shape[1] * k_cache.shape[1], q.shape[1],
            k_cache.shape[2], q.shape[2], k_cache.shape[1], q.dtype, *window_and_cap,
        )  # fmt: skip
        return paged(
            q, k_cache, v_cache, cu_seqlens_q.tolist(), cache_seqlens, page_table, 1,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
        attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        calls.append("plan")
        assert causal
        assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == batch_size + 1
        plan = types.SimpleNamespace()
        plan.arguments = (
            batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, page_size,
            qkv_dtype, *window_size, has_softcap,
        )  # fmt: skip
        return plan

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.get_scheduler_metadata = get_scheduler_metadata
    return module


@pytest.fixture
def calls(monkeypatch):
    """Installs the fakes on a fake Ampere GPU; lists the calls that reach them."""
    seen = []
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn_2(seen))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3(seen))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    return seen


SHAPES = [
    {},
    {"group_size": 2, "num_kv_heads": 2},
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"softcap": 2.0, "spread": 5.0},
    {"scale": 0.3, "sliding_window": 300, "softcap": 4.0},
]


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("lengths", [[(1, 9), (1, 258), (3, 20)], [(1, 1), (1, 256), (1, 258)]])
def test_any_batch_is_one_varlen_call(calls, lengths, options):
    case = make_case(*lengths, block_size=256, dtype=torch.float16, **options)
    case.check(FlashAttnBackend(**OPTIONS))
    assert calls == ["varlen"]


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("lengths", [[(1, 70), (3, 20)], [(1, 3), (1, 65)]])
def test_hopper_uses_flash_attention_3_if_installed(calls, monkeypatch, lengths, options):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    case = make_case(*lengths, block_size=64, dtype=torch.float16, **options)
    case.check(FlashAttnBackend(**OPTIONS | {"block_size": 64}))
    assert calls == ["plan", "kvcache 3"]


def test_layers_of_one_kind_share_a_plan(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    backend = FlashAttnBackend(**OPTIONS | {"block_size": 64})
    case = make_case((1, 70), (1, 20), block_size=64, dtype=torch.float16)
    windowed = replace(case.spec, sliding_window=7)
    for _step in range(2):
        case.batch.attention = backend.prepare(case.batch)
        for spec in (case.spec, windowed, case.spec, windowed):
            backend.attend(case.q, LayerCache(case.k_cache, case.v_cache, spec), case.batch)
    assert calls == 2 * ["plan", "kvcache 3", "plan", *3 * ["kvcache 3"]]


def test_an_older_flash_attention_3_plans_in_each_layer(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delattr(sys.modules["flash_attn_interface"], "get_scheduler_metadata")
    case = make_case((1, 70), (3, 20), block_size=64, dtype=torch.float16)
    case.check(FlashAttnBackend(**OPTIONS | {"block_size": 64}))
    assert calls == ["kvcache 3"]


def test_hopper_without_flash_attention_3_uses_2(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    backend = FlashAttnBackend(**OPTIONS)
    assert backend.version == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "float16, bfloat16, got torch.float32"),
        ({"head_dim": 257}, "head dims from 8 to 256 in steps of 8, got 257"),
        ({"head_dim": 100}, "head dims from 8 to 256 in steps of 8, got 100"),
        ({"block_size": 64}, "multiple of 256, got 64"),
        ({"device": torch.device("cpu")}, "supports cuda, got cpu"),
    ],
)
def test_unsupported_arguments_raise(calls, change, words):
    with pytest.raises(ConfigError, match=words):
        FlashAttnBackend(**OPTIONS | change)


def test_sinks_raise():
    backend = FlashAttnBackend.__new__(FlashAttnBackend)
    config = load_model_config(checkpoint("gpt_oss"))
    context = make_context(kernels=Kernels(backend))
    with pytest.raises(
        ConfigError, match="'flash_attn' does not support this model's attention sin"
    ):
        GenericAttention("self_attn", 0, config, context)


@pytest.mark.parametrize(
    ("capability", "package", "error", "words"),
    [
        ((7, 5), None, ConfigError, r"8\.0 or newer"),
        ((8, 0), None, MissingDependencyError, r"nanoengine\[flash\]"),
        ((9, 0), None, MissingDependencyError, r"nanoengine\[flash\]"),
        # In version 4, `flash_attn` only contains `cute`. It was mistaken for version 2.
        ((9, 0), "flash_attn", MissingDependencyError, "FlashAttention-2 or, on Hopper, -3"),
    ],
)
def test_a_missing_package_or_gpu_is_named(calls, monkeypatch, capability, package, error, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    module = package and types.ModuleType(package)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(error, match=words):
        FlashAttnBackend(**OPTIONS)


def test_a_broken_package_raises_its_own_error(calls, monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        FlashAttnBackend(**OPTIONS)
