"""The feature matrix: no feature changes the output.

Greedy tokens are the same with every feature on or off, for any batch neighbours, chunk size, block
size and preemption, in the plain loop and in the overlapped one. So are seeded samples. The models
are tiny and in float64, so that rounding can neither hide nor fake a bug. Each new feature adds a
line to `VARIANTS`.
"""

import functools
import itertools

import pytest
import torch

from nanoengine import LLM, DiskTier, HostTier, StructuredOutputs
from nanoengine.features import structured
from nanoengine.settings.params import SamplingParams
from tests.support.drafts import draft_always
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.grammars import any_text
from tests.support.processors import Foretold

NUM_TOKENS = 12
MODELS = {
    "full": ("qwen3", {}),
    "window": ("mistral", {"sliding_window": 16}),
    "hybrid": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "gemma3": ("gemma3", {}),
}


def prompts():
    """Prompts of mixed lengths; some share a prefix, two are equal."""
    distinct = random_prompts(8, [1, 7, 16, 33, 48])
    prefix = random_prompts(1, [40], seed=9)[0]
    return distinct + [prefix + tail for tail in random_prompts(3, [1, 9, 25], seed=5)] + [
        distinct[3]
    ]  # fmt: skip


def alone(model, **options):
    """The reference: each prompt in its own engine, nothing shared, no chunked prefill."""
    family, overrides = MODELS[model]
    engine = make_engine(
        checkpoint(family, **overrides), enable_prefix_caching=False, max_num_seqs=1, **options
    )
    return [tokens(run(engine, [prompt], greedy(NUM_TOKENS)))[0] for prompt in prompts()]


@pytest.fixture(scope="module")
def truth():
    return {model: alone(model) for model in MODELS}


CHUNKS = {"chunk7": 7, "whole": 0}
VARIANTS = [
    pytest.param(
        {"enable_prefix_caching": caching, "long_prefill_threshold": chunk, "block_size": size}
        | pool,
        id=f"{'cache' if caching else 'nocache'}-{name}-bs{size}-{'small' if pool else 'large'}",
    )
    for caching, (name, chunk), size in itertools.product(
        (True, False), CHUNKS.items(), (8, 16, 256)
    )
    for pool in ({}, {"num_kv_blocks": {8: 25, 16: 14, 256: 4}[size]})
]


LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@LOOPS
@pytest.mark.parametrize("options", VARIANTS)
def test_greedy_tokens_do_not_depend_on_features(options, overlap, truth):
    engine = make_engine(checkpoint("qwen3"), overlap=overlap, **options)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth["full"]
    stats = engine.stats()
    if "num_kv_blocks" in options and options["block_size"] < 256:
        assert stats.preemptions > 0, "the pool was meant to be too small"
    if options["enable_prefix_caching"] and not options["long_prefill_threshold"]:
        shared = stats.cache_hit_tokens > 0 or options["block_size"] == 256
        assert shared, "prefixes were meant to be found"


@functools.cache
def quantized_truth(quantization):
    return alone("full", quantization=quantization)


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        ("int8", {"block_size": 8, "num_kv_blocks": 25}),
        ("int8", {"block_size": 16, "long_prefill_threshold": 7}),
        ("int4", {"block_size": 8, "num_kv_blocks": 25}),
        ("int4", {"max_num_batched_tokens": 16, "max_num_seqs": 3}),
        ("int4_weight_only", {"block_size": 16, "long_prefill_threshold": 7}),
    ],
)
def test_quantized_models_do_not_depend_on_batch_or_features(quantization, options, truth):
    """Activation scales are per token, so they depend neither on neighbours nor on chunks."""
    engine = make_engine(checkpoint("qwen3"), quantization=quantization, **options)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == quantized_truth(quantization)
    assert quantized_truth(quantization) != truth["full"], "quantizing was meant to show"


@functools.cache
def int8_truth():
    return alone("full", kv_cache_dtype="int8")


@LOOPS
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 8, "num_kv_blocks": 25},
        {"block_size": 16, "long_prefill_threshold": 7, "attention_backend": "cpu"},
        {"block_size": 8, "num_kv_blocks": 25, "attention_backend": "cpu"},
    ],
)
def test_an_int8_cache_does_not_depend_on_batch_or_features(options, overlap, truth):
    """Keys and values are quantized per token."""
    engine = make_engine(checkpoint("qwen3"), kv_cache_dtype="int8", overlap=overlap, **options)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == int8_truth()
    assert int8_truth() != truth["full"], "rounding was meant to show"


def test_tiers_do_not_change_outputs_of_an_int8_cache(tmp_path):
    tiers = [HostTier(gib=0.0003, policy="load"), DiskTier(tmp_path, gib=0.01, policy="load")]
    for _ in range(2):
        engine = make_engine(
            checkpoint("qwen3"), kv_cache_dtype="int8", block_size=8, num_kv_blocks=40,
            kv_tiers=tiers,
        )  # fmt: skip
        assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == int8_truth()
        stats = engine.stats()
        engine.close()
    assert stats.tiers[1].loaded_blocks > 0, "the disk was meant to be read"


@pytest.mark.parametrize("model", ["window", "hybrid", "gemma3"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [7, 0])
@pytest.mark.parametrize(("blocks", "overlap"), [(40, False), (40, True), (200, True)])
def test_features_do_not_change_outputs_of_windowed_models(
    model, caching, chunk, blocks, overlap, truth
):
    family, overrides = MODELS[model]
    engine = make_engine(
        checkpoint(family, **overrides),
        enable_prefix_caching=caching,
        long_prefill_threshold=chunk,
        block_size=8,
        num_kv_blocks=blocks,
        max_num_batched_tokens=256,
        overlap=overlap,
    )
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth[model]
    again = tokens(run(engine, prompts(), greedy(NUM_TOKENS)))
    assert again == truth[model], "a second run reads what the first has cached"


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("overlap", [False, True])
def test_tiers_do_not_change_outputs(model, overlap, truth, tmp_path):
    family, overrides = MODELS[model]
    tiers = [
        HostTier(gib=0.0005, policy="load"),
        DiskTier(tmp_path, gib=0.01, policy="load"),
    ]
    for _ in range(2):  # the second engine starts from the first one's directory
        engine = make_engine(
            checkpoint(family, **overrides),
            block_size=8,
            num_kv_blocks=40,
            kv_tiers=tiers,
            overlap=overlap,
        )
        assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth[model]
        stats = engine.stats()
        engine.close()
    assert stats.tiers[1].loaded_blocks > 0, "the disk was meant to be read"


@LOOPS
@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "cpu", "block_size": 8, "num_kv_blocks": 25},
        {"attention_backend": "cpu", "block_size": 16, "long_prefill_threshold": 7},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"enable_chunked_prefill": False, "max_model_len": 128, "max_num_batched_tokens": 256},
        {"watermark_frac": 0.2, "num_kv_blocks": 30, "block_size": 8},
        {"admission": "predictive", "num_kv_blocks": 25, "block_size": 8},
    ],
)
def test_other_settings_do_not_change_outputs(options, overlap, truth):
    engine = make_engine(checkpoint("qwen3"), overlap=overlap, **options)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth["full"]


@LOOPS
def test_n_sequences_with_top_k_1_equal_the_greedy_one(overlap, truth):
    params = SamplingParams(n=3, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    for blocks in (200, 30):  # the small pool preempts forks and resumes them
        engine = make_engine(
            checkpoint("qwen3"), block_size=8, num_kv_blocks=blocks, overlap=overlap
        )
        found = tokens(run(engine, prompts(), params))
        assert found == [[output] * 3 for (output,) in truth["full"]]


@LOOPS
def test_speculation_does_not_change_outputs(overlap, truth):
    engine = make_engine(
        checkpoint("qwen3"),
        speculative="ngram:max=3,min=1,k=4",
        block_size=8,
        num_kv_blocks=25,
        long_prefill_threshold=7,
        overlap=overlap,
    )
    draft_always(engine)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth["full"]
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.drafted_tokens > 50
    assert stats.drafted_tokens > stats.accepted_tokens > 0


@pytest.mark.parametrize(
    ("speculative", "overlap"),
    [(None, False), ("ngram:max=3,min=1,k=4", False), ("ngram:max=3,min=1,k=4", True)],
)
def test_jump_forward_tokens_do_not_change_outputs(speculative, overlap, truth):
    """Also when tokens that a processor proposes as forced differ from the sampled ones."""
    texts = dict(zip(map(tuple, prompts()), (t for (t,) in truth["full"]), strict=True))
    engine = make_engine(
        checkpoint("qwen3"),
        speculative=speculative,
        logits_processors=[Foretold(texts, right=False)],
        block_size=8,
        num_kv_blocks=25,
        long_prefill_threshold=7,
        overlap=overlap,
    )
    draft_always(engine)
    assert tokens(run(engine, prompts(), greedy(NUM_TOKENS))) == truth["full"]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens > stats.accepted_tokens > 50


@LOOPS
@pytest.mark.parametrize("speculative", [None, "ngram:max=3,min=1,k=4"])
def test_a_grammar_that_allows_everything_does_not_change_outputs(
    speculative, overlap, truth, monkeypatch
):
    monkeypatch.setattr(structured, "_library", any_text)
    engine = make_engine(
        checkpoint("qwen3"),
        speculative=speculative,
        block_size=8,
        num_kv_blocks=25,
        long_prefill_threshold=7,
        overlap=overlap,
    )
    if speculative:
        draft_always(engine)
    anything = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        structured_outputs=StructuredOutputs(grammar="anything"),
    )
    every_second = [anything, greedy(NUM_TOKENS)] * len(prompts())
    found = tokens(run(engine, prompts(), every_second[: len(prompts())]))
    (eos,) = engine.info.eos_token_ids
    for i, ((output,), (expected,)) in enumerate(zip(found, truth["full"], strict=True)):
        end = expected.index(eos) + 1 if i % 2 == 0 and eos in expected else NUM_TOKENS
        assert output == expected[:end]
    assert engine.stats().preemptions > 0


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)


@LOOPS
def test_seeded_samples_are_the_same_alone_and_in_a_batch_of_32(overlap):
    prompt = prompts()[3]
    engine = make_engine(checkpoint("qwen3"))
    (expected,) = tokens(run(engine, [prompt], SEEDED))
    others = random_prompts(31, [1, 7, 16, 33, 48], seed=4)
    unseeded = [SamplingParams(temperature=1.3, top_k=20, max_tokens=30)] * 31
    busy = make_engine(
        checkpoint("qwen3"), max_num_batched_tokens=64, max_num_seqs=32, overlap=overlap
    )
    params = [*unseeded[:9], SEEDED, *unseeded[9:]]
    found = tokens(run(busy, [*others[:9], prompt, *others[9:]], params))
    assert found[9] == expected
    assert expected != tokens(run(engine, [prompt], greedy(NUM_TOKENS)))[0], "nothing was sampled"


@LOOPS
def test_seeded_samples_are_the_same_after_preemption(overlap):
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)
    ]
    inputs = random_prompts(6, [20])
    expected = tokens(run(make_engine(checkpoint("qwen3")), inputs, params))
    small = make_engine(checkpoint("qwen3"), block_size=8, num_kv_blocks=22, overlap=overlap)
    assert tokens(run(small, inputs, params)) == expected
    assert small.stats().preemptions > 0


@pytest.mark.parametrize("backend", ["naive", "cpu", "triton"])
def test_old_content_of_a_block_does_not_change_outputs(backend):
    """NaN in freed blocks must not affect the next sequence, not even multiplied by zero."""
    small = {"head_dim": 64, "num_hidden_layers": 1}
    options = {"block_size": 16, "num_kv_blocks": 20, "max_num_seqs": 4, "dtype": "float32"}
    engine = make_engine(checkpoint("qwen3", **small), attention_backend=backend, **options)
    # Triton's interpreter is slow; two prompts also fill blocks partially.
    inputs = random_prompts(2 if backend == "triton" else 3, [5, 17, 33])
    expected = tokens(run(engine, inputs, greedy(4)))
    engine.reset_prefix_cache()
    with torch.inference_mode():
        engine.executor.kv_cache.kv.fill_(float("nan"))
    assert tokens(run(engine, inputs, greedy(4))) == expected


def scored(options, order=slice(None), threads=None):
    """Per prompt its tokens and log-probabilities on a CPU in float32; some contexts are longer
    than one split of attention."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    sizes = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 100}
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with LLM(checkpoint("qwen3"), skip_tokenizer_init=True, **sizes | options) as llm:
            found = llm.generate((prompts() + random_prompts(2, [300, 450]))[order], params)
    finally:
        torch.set_num_threads(before)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found][order]


@pytest.mark.parametrize(
    ("options", "order", "threads"),
    [
        ({"max_num_seqs": 1}, slice(None), None),
        ({"enable_prefix_caching": False}, slice(None, None, -1), None),
        ({"overlap": True}, slice(None), 1),
    ],
)
def test_batch_order_and_threads_do_not_change_bits(options, order, threads):
    assert scored(options, order, threads) == scored({"enable_prefix_caching": False})
