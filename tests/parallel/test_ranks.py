"""Two ranks give the tokens of one: with gloo, on a CPU, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoengine import StructuredOutputs
from nanoengine.errors import ConfigError, RequestError
from nanoengine.features import structured
from nanoengine.settings.params import SamplingParams
from tests.support.checkpoints import FAMILIES
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.grammars import VOCAB_SIZE, even_text, text_checkpoint
from tests.support.processors import either
from tests.support.quantized_checkpoints import make_mxfp4
from tests.support.thread_ranks import thread_ranks_fixture as thread_ranks_fixture

SMALL = {
    "device": "cpu", "dtype": "float32",
    "block_size": 8, "num_kv_blocks": 30, "long_prefill_threshold": 7,
}  # fmt: skip
"""Options for chunked prefill and a pool that is too small for all sequences at once."""

# Why more blocks: the pool of recurrent states is larger too, which leaves some for snapshots.
BLOCKS = dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_moe", "falcon_h1", "nemotron_h"), 60
) | dict.fromkeys(("bamba", "granite_hybrid"), 100)  # fmt: skip

SAME_LAYERS = {
    "gemma", "gemma3_vision", "gemma4_unified", "gemma4_vision", "glm", "glm4", "granite",
    "granitemoeshared", "hunyuan_moe", "hy_v3", "ministral", "ministral3", "mistral", "smollm3",
}  # fmt: skip
"""Families whose sharded layers are those of other families."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name -> family, fields of its config, engine options
    **{
        family: (family, {}, {"attention_backend": "cpu", "num_kv_blocks": BLOCKS.get(family, 30)})
        for family in FAMILIES
        if family not in SAME_LAYERS
    },
    "one KV head": ("qwen2", {"num_key_value_heads": 1}, {"attention_backend": "naive"}),
    "overlapped": ("qwen3", {}, {"overlap": True, "kv_cache_dtype": "int8"}),
    "experts in int4": (
        "qwen3_moe",
        {"moe_intermediate_size": 512, "intermediate_size": 512, "head_dim": 128},
        {"quantization": "int4_weight_only"},
    ),
    "int4": (
        "llama",
        {"intermediate_size": 512, "head_dim": 128},
        {"quantization": "int4_weight_only", "kv_cache_dtype": "bfloat16"},
    ),
}


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with common prefixes, greedy and seeded params, with all optional results."""
    prefix = random_prompts(1, [24], seed=9)[0]
    prompts = random_prompts(6, [1, 7, 16, 33]) + [prefix + tail for tail in ([5], [6, 7], [8] * 9)]
    sampled = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=20, n=2, max_tokens=12, ignore_eos=True),
        SamplingParams(
            temperature=1.0,
            min_p=0.05,
            repetition_penalty=1.3,
            max_tokens=12,
            logits_processors=[either],
        ),
    ]
    return prompts * 2, [greedy(12)] * len(prompts) + (sampled * len(prompts))[: len(prompts)]


PROCESSES = ("overlapped",)
"""Cases that run on two processes. The others run on two threads of this process: they do the same
gloo reductions and need no process that loads torch."""

USUAL = ("qwen3", "gemma3", "gpt_oss", "qwen3_next", "one KV head", "int4", "experts in int4")
"""Cases that cover each way to shard weights, caches and states. The others run when the files that
they guard change: the sharding of a family is defined in its layers."""
FAMILY = pytest.mark.guards(
    "nanoengine/ranks/*.py", "nanoengine/models/*.py", "nanoengine/layers/*.py"
)


@pytest.mark.parametrize("case", PROCESSES)
def test_two_ranks_generate_the_tokens_of_one(case: str) -> None:
    check(case)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    "case",
    [
        case if case in USUAL else pytest.param(case, marks=FAMILY)
        for case in CASES
        if case not in PROCESSES
    ],
)
def test_two_ranks_generate_the_tokens_of_one_for_any_family(case: str) -> None:
    check(case)


def check(case: str) -> None:
    family, fields, options = CASES[case]
    directory, options = checkpoint(family, **fields), SMALL | options
    one = make_engine(directory, **options)
    two = make_engine(directory, tensor_parallel_size=2, **options)
    one_head = FAMILIES[family][1].get("num_key_value_heads") == 1
    shared = one_head or "num_key_value_heads" in fields or "kv_lora_rank" in FAMILIES[family][1]
    heads_each = 1 if shared else 2
    assert two.info.block_bytes * heads_each == one.info.block_bytes
    assert len(two.executor._ranks.workers) == 2
    expected, found = run(one, *work()), run(two, *work())
    assert tokens(found) == tokens(expected)
    stats = two.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.cache_hit_tokens > 0, "prefixes were meant to be found"
    assert stats == one.stats(), "the same plans"
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (a,), (b,) = (run(engine, [[5, 9, 11]], asked) for engine in (one, two))
    for ours, theirs in (
        (a.sequences[0].extras.logprobs, b.sequences[0].extras.logprobs),
        (a.prompt_logprobs, b.prompt_logprobs),
    ):
        flat = [[entry for token in entries for entry in token] for entries in (ours, theirs)]
        assert [entry.token_id for entry in flat[0]] == [entry.token_id for entry in flat[1]]
        assert [e.logprob for e in flat[0]] == pytest.approx([e.logprob for e in flat[1]], abs=1e-4)
    with pytest.raises(RequestError, match="can't be sent to a rank"):
        two.add_request("a", [5], SamplingParams(logits_processors=[lambda ids, x: x]))
    two.close()


@pytest.mark.usefixtures("thread_ranks")
def test_each_rank_compiles_its_own_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar allows even tokens and may end anywhere; other prompts have no grammar."""
    monkeypatch.setattr(structured, "_library", even_text)
    prompts, _ = work()
    even = SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputs(grammar="even")
    )
    drawn = replace(even, temperature=0.9, seed=1, n=2)
    params = [even, greedy(24), drawn] * len(prompts)
    one, two = (make_engine(checkpoint("llama"), tensor_parallel_size=n, **SMALL) for n in (1, 2))
    expected, found = (run(engine, prompts, params[: len(prompts)]) for engine in (one, two))
    assert tokens(found) == tokens(expected)
    assert two.stats().preemptions > 0
    bound = [seq for i, r in enumerate(found) for seq in r.sequences if i % 3 != 1]
    assert len(bound) > 6 and not any(t % 2 for seq in bound for t in seq.output_token_ids)
    two.close()


def test_a_grammar_on_two_ranks_generates_the_tokens_of_one() -> None:
    """Runs on two processes; each compiles the grammar itself."""
    prompts = random_prompts(5, [1, 9, 20], vocab_size=VOCAB_SIZE)
    params = [
        SamplingParams(
            max_tokens=40,
            seed=i,
            n=1 + i % 2,
            temperature=i % 2,
            structured_outputs={"json": {"enum": ["Tom", "the dog", 7]}}
            if i % 2
            else {"regex": "(the|and| )+[a-z]{3}"},
        )
        for i in range(len(prompts))
    ]
    one, two = (
        make_engine(text_checkpoint("llama"), tensor_parallel_size=n, **SMALL) for n in (1, 2)
    )
    expected, found = (run(engine, prompts, params) for engine in (one, two))
    assert tokens(found) == tokens(expected)
    seqs = [seq for request in found for seq in request.sequences]
    assert sum(seq.finish_reason == "stop" for seq in seqs) >= 3
    for broken in ({"json": {"not": {}}}, {"regex": "("}):
        with pytest.raises(RequestError, match="can't be compiled"):
            two.add_request("b", [5], SamplingParams(structured_outputs=broken))
    two.close()


@pytest.mark.usefixtures("thread_ranks")
def test_two_ranks_shard_mxfp4_experts(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    one, two = (make_engine(str(tmp_path), tensor_parallel_size=n, **SMALL) for n in (1, 2))
    prompts, params = random_prompts(3, [1, 7, 16]), greedy(12)
    assert tokens(run(two, prompts, params)) == tokens(run(one, prompts, params))
    two.close()


def test_ranks_that_would_split_a_quantization_group_raise(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, intermediate_size=96)
    with pytest.raises(ConfigError, match="a rank's part of 48 is not a multiple of 32"):
        make_engine(str(tmp_path), tensor_parallel_size=2, **SMALL)
