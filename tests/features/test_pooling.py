"""Embeddings, scores, classes and rewards against transformers, and against each other."""

from __future__ import annotations

import functools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanoengine import LLM, PoolingParams, SamplingParams
from nanoengine.errors import (
    ModelError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
)
from nanoengine.observe.trace_reader import read_trace
from nanoengine.settings.pooling import PooledParams
from tests.support.pooled_checkpoints import describe, make_pooled, set_keys

OPTIONS = {"num_kv_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
QUIET = {"use_tqdm": False}
TEXTS = ["The little girl", "a dog went to the park. " * 3, "é", "def f(x): return x + 1 " * 4]
RANDOM = torch.Generator().manual_seed(7)
PROMPTS = [torch.randint(5, 400, (n,), generator=RANDOM).tolist() for n in (1, 17, 70, 33)]
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lm")
    return directory, make_pooled(directory, "lm")


@pytest.fixture(scope="module")
def one_class(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    return directory, make_pooled(directory, "classes", num_labels=1)


def hidden_states(model, token_ids):
    return model.base_model(torch.tensor([token_ids])).last_hidden_state[0]


def vectors(outputs):
    return [np.array(one.outputs.embedding, np.float32) for one in outputs]


def assert_close(found, expected, atol=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


# --- vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "lfm2"])
def test_embeddings_equal_hidden_states_of_transformers(tmp_path, family):
    model = make_pooled(tmp_path, "model", family)
    with LLM(tmp_path, **OPTIONS, max_model_len=128) as llm:
        for pooling in ("last", "mean", "cls"):
            params = PoolingParams(pooling=pooling, normalize=False)
            found = llm.embed(PROMPTS, pooling_params=params, **QUIET)
            for token_ids, vector in zip(PROMPTS, vectors(found), strict=True):
                states = hidden_states(model, token_ids)
                expected = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
                cosine = torch.cosine_similarity(torch.from_numpy(vector), expected, dim=0)
                assert cosine > 0.99999
                assert_close([vector], [expected], atol=1e-4)
        with pytest.raises(RequestError, match="no LM head"):
            llm.generate(PROMPTS[:1], **QUIET)
        (vector,) = vectors(llm.embed([[5, 6, 7]], **QUIET))
        assert np.isclose(np.linalg.norm(vector), 1)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False, "max_num_batched_tokens": 200},
        {"attention_backend": "naive", "max_num_batched_tokens": 7},
        {"overlap": True, "num_kv_blocks": 7, "debug_checks": True, "block_size": 16},
    ],
)
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_no_option_changes_an_embedding(lm, options, pooling):
    directory, model = lm
    shared = [PROMPTS[2][:48] + tail for tail in ([7], [8, 9], PROMPTS[3], [7])]
    params = PoolingParams(pooling=pooling, normalize=False)
    with LLM(directory, **{**OPTIONS, **options}, max_model_len=96) as llm:
        found = llm.embed(PROMPTS + shared, pooling_params=params, **QUIET)
    for token_ids, vector in zip(PROMPTS + shared, vectors(found), strict=True):
        states = hidden_states(model, token_ids)
        expected = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
        assert_close([vector], [expected], atol=1e-4)


def test_a_shared_prefix_is_cached_only_for_last_token_pooling(lm):
    directory, _ = lm
    begins = PROMPTS[2][:48]
    with LLM(directory, **OPTIONS, block_size=16) as llm:
        for pooling, cached in (("last", 48), ("mean", 0), ("cls", 0)):
            params = PoolingParams(pooling=pooling)
            llm.embed([[*begins, 9]], pooling_params=params, **QUIET)
            (again,) = llm.embed([[*begins, 7, 8]], pooling_params=params, **QUIET)
            assert again.num_cached_tokens == cached
        assert llm.stats().output_tokens == 0


def test_embeddings_and_completions_run_in_one_batch(lm):
    directory, _ = lm
    greedy = SamplingParams(temperature=0, max_tokens=6)
    scored = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1)
    drawn = SamplingParams(temperature=1, max_tokens=6, seed=3, logprobs=1)
    mean, every = PooledParams(pooling="mean"), PooledParams(pooling="all")
    params = [greedy, PooledParams(), scored, mean, drawn, every, greedy, every]
    prompts = [PROMPTS[n % 4] for n in range(len(params))]
    with LLM(directory, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [llm.generate([p], one, **QUIET)[0] for p, one in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params, **QUIET)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, its in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (mine or {}).keys() == (its or {}).keys()
        if one.pooled is not None:
            assert_close([one.pooled], [other.pooled])
            assert one.outputs[0].token_ids == []


def test_a_trace_of_pooled_prompts_is_replayed(lm, tmp_path):
    directory, _ = lm
    params = [PooledParams(pooling=pooling) for pooling in ("last", "mean", "cls", "last")]
    path = str(tmp_path / "run.trace")
    with LLM(directory, **OPTIONS, trace=path) as llm:
        llm.generate(PROMPTS, params, **QUIET)
        steps = llm.stats().steps
    ended = []
    replay = read_trace(path).replay()
    replay.run(SimpleNamespace(on_step=lambda plan, result, scheduler: ended.append(plan.step)))
    assert len(ended) == steps


def test_embeddings_are_truncated_before_normalization(lm):
    directory, _ = lm
    with LLM(directory, **OPTIONS) as llm:
        (whole,) = vectors(llm.embed([PROMPTS[1]], **QUIET))
        (cut,) = vectors(
            llm.embed([PROMPTS[1]], pooling_params=PoolingParams(dimensions=8), **QUIET)
        )
        assert_close([cut], [whole[:8] / np.linalg.norm(whole[:8])])
        with pytest.raises(RequestError, match="dimensions must be at most 64, got 65"):
            llm.embed([PROMPTS[1]], pooling_params=PoolingParams(dimensions=65), **QUIET)
    with pytest.raises(RequestError, match="dimensions must be at least 1"):
        PoolingParams(dimensions=0)


def test_a_pooled_prompt_may_fill_the_context(lm):
    directory, model = lm
    with LLM(directory, **OPTIONS, max_model_len=64) as llm:
        (found,) = llm.embed([PROMPTS[2][:64]], pooling_params=RAW, **QUIET)
        assert_close(vectors([found]), [hidden_states(model, PROMPTS[2][:64])[-1]], atol=1e-4)
        with pytest.raises(PromptTooLongError, match="65 tokens; max_model_len=64 allows 64"):
            llm.embed([PROMPTS[2][:65]], **QUIET)
        bad, good = llm.embed([PROMPTS[2], PROMPTS[1]], on_error="record", **QUIET)
        assert bad.outputs is None and "70 tokens" in bad.error
        assert good.error is None


def test_a_prompt_with_nan_states_fails_alone(lm):
    directory, _ = lm
    with LLM(directory, **OPTIONS) as llm:
        table = llm.engine.executor.model.model.embed_tokens
        plain = table.lookup

        def broken(ids):
            rows = plain(ids).clone()
            rows[ids == 9] = torch.nan
            return rows

        table.lookup = broken
        bad, good = llm.embed([[5, 9], [5, 6]], **QUIET)
    assert bad.outputs is None and "NaN" in bad.error
    assert good.error is None


# --- Sentence Transformers' files -----------------------------------------------------------------


def test_modules_json_selects_the_pooling(tmp_path):
    model = make_pooled(tmp_path, "model")
    states = hidden_states(model, PROMPTS[1])
    for config, expected in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, states.mean(0)),
        ({"pooling_mode_lasttoken": True}, states[-1]),
        ({"pooling_mode": "cls"}, states[0]),
    ):
        describe(tmp_path, config)
        with LLM(tmp_path, **OPTIONS) as llm:
            assert_close(vectors(llm.embed([PROMPTS[1]], **QUIET)), [expected], atol=1e-4)
    describe(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Normalize"))
    with LLM(tmp_path, **OPTIONS) as llm:
        (vector,) = vectors(llm.embed([PROMPTS[1]], **QUIET))
        assert_close([vector], [states.mean(0) / states.mean(0).norm()])


@pytest.mark.parametrize(
    ("config", "kinds", "error"),
    [
        ({"pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), "pooling_mode_max_tokens"),
        ({"pooling_mode": ["cls", "mean"]}, ("Transformer", "Pooling"), "pooling_mode_cls_token"),
        ({}, ("Transformer", "Pooling"), "no pooling"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "LSTM"), "LSTM"),
        ({}, ("Transformer", "Dense", "Pooling"), "Dense,"),
    ],
)
def test_modules_that_are_not_implemented_are_named(lm, tmp_path, config, kinds, error):
    shutil.copytree(lm[0], tmp_path, dirs_exist_ok=True)
    describe(tmp_path, config, kinds)
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(UnsupportedModelError, match=error):
        llm.embed(["a"], **QUIET)


def test_a_module_outside_of_the_checkpoint_is_not_read(lm, tmp_path):
    shutil.copytree(lm[0], tmp_path, dirs_exist_ok=True)
    describe(tmp_path, {"pooling_mode": "mean"})
    modules = (tmp_path / "modules.json").read_text().replace("1_Pooling", "../1_Pooling")
    (tmp_path / "modules.json").write_text(modules)
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(ModelError, match="directory outside"):
        llm.embed(["a"], **QUIET)


def test_texts_longer_than_max_seq_length_raise_or_are_truncated(lm, tmp_path):
    shutil.copytree(lm[0], tmp_path, dirs_exist_ok=True)
    describe(tmp_path, {"pooling_mode": "mean"})
    set_keys(tmp_path / "sentence_bert_config.json", max_seq_length=8)
    with LLM(tmp_path, **OPTIONS) as llm:
        with pytest.raises(PromptTooLongError, match="at most 8"):
            llm.embed([TEXTS[1]], **QUIET)
        ids = llm.tokenizer.encode(TEXTS[1])
        for most, length in ((-1, 8), (5, 5), (100, 8)):
            cut = PoolingParams(truncate_prompt_tokens=most)
            (found,) = llm.embed([TEXTS[1]], pooling_params=cut, **QUIET)
            assert found.prompt_token_ids == ids[:length]
        (given,) = llm.embed([PROMPTS[1]], pooling_params=cut, **QUIET)
        assert given.prompt_token_ids == PROMPTS[1][:8]


# --- architectures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is an encoder"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "is an encoder"),
        ({"architectures": ["ModernBertModel"]}, "is an encoder"),
        ({"architectures": ["BloomModel"]}, "unsupported architecture 'BloomModel'"),
        ({"is_causal": False}, "is_causal=False is not implemented"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_encoders_raise_and_are_named(lm, tmp_path, keys, error):
    shutil.copytree(lm[0], tmp_path, dirs_exist_ok=True)
    set_keys(tmp_path / "config.json", **keys)
    with pytest.raises(UnsupportedModelError, match=error):
        LLM(tmp_path, **OPTIONS)


# --- classes and scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "llama"])
def test_class_probabilities_equal_transformers(tmp_path, family):
    model = make_pooled(tmp_path, "classes", family, num_labels=3)
    logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    with LLM(tmp_path, **OPTIONS) as llm:
        found = [one.outputs.probs for one in llm.classify(PROMPTS, **QUIET)]
        assert_close(found, [one.softmax(0) for one in logits])
        found = [one.outputs.probs for one in llm.classify(PROMPTS, pooling_params=RAW, **QUIET)]
        assert_close(found, logits, atol=1e-4)
        assert_close([one.outputs.data for one in llm.reward(PROMPTS, **QUIET)], logits, atol=1e-4)
        with pytest.raises(UnsupportedModelError, match=r"score\.weight has 3: call classify"):
            llm.score("a", "b", **QUIET)
    set_keys(tmp_path / "config.json", problem_type="multi_label_classification")
    with LLM(tmp_path, **OPTIONS) as llm:
        found = [one.outputs.probs for one in llm.classify(PROMPTS, **QUIET)]
        assert_close(found, [one.sigmoid() for one in logits])


def test_a_head_of_one_class_scores_pairs(one_class):
    directory, model = one_class
    with LLM(directory, **OPTIONS) as llm:
        backend = llm.get_tokenizer()
        ids = [backend(TEXTS[0], text)["input_ids"] for text in TEXTS[1:]]
        expected = [model(torch.tensor([one])).logits[0, 0].sigmoid() for one in ids]
        found = llm.score(TEXTS[0], TEXTS[1:], **QUIET)
        assert_close([one.outputs.score for one in found], expected)
        assert [one.prompt_token_ids for one in found] == ids
        text = f"Q: {TEXTS[0]} D: {{query}} é"
        (filled,) = llm.score(TEXTS[0], "{query} é", template="Q: {query} D: {document}", **QUIET)
        assert filled.prompt_token_ids == llm.tokenizer.encode(text)
        for template in ("{query}", "{document}", "{query}{query}{document}"):
            with pytest.raises(RequestError, match="template must contain"):
                llm.score("a", "b", template=template, **QUIET)


def test_a_language_model_scores_pairs_by_the_probability_of_an_answer(lm, tmp_path):
    directory, model = lm
    with LLM(directory, **OPTIONS) as llm:
        encode = llm.tokenizer.encode
        words = ("n", "y")
        ids = [encode(word, add_special_tokens=False)[0] for word in words]
        template = "{query} | {document} ?"
        found = llm.score(TEXTS[0], TEXTS[1:], answers=words, template=template, **QUIET)
        for one, text in zip(found, TEXTS[1:], strict=True):
            prompt = encode(f"{TEXTS[0]} | {text} ?")
            logits = model(torch.tensor([prompt])).logits[0, -1, ids]
            assert_close([one.outputs.score], [logits.softmax(0)[1]])
        for answers in (["y"], ["y", "The little"]):
            with pytest.raises(RequestError, match="answers must be at least two words"):
                llm.score("a", "b", answers=answers, **QUIET)
    make_pooled(tmp_path, "lm", "cohere")  # its logits are scaled
    with (
        LLM(tmp_path, **OPTIONS, max_model_len=64) as llm,
        pytest.raises(UnsupportedModelError, match="CohereForCausalLM has none"),
    ):
        llm.score("a", "b", answers=words, **QUIET)


def test_without_a_head_a_score_is_the_cosine_of_both_embeddings(lm):
    directory, model = lm
    with LLM(directory, **OPTIONS) as llm:
        states = [hidden_states(model, llm.tokenizer.encode(text))[-1] for text in TEXTS]
        found = llm.score(TEXTS[:2], TEXTS[2:], **QUIET)
        expected = [
            torch.cosine_similarity(a, b, dim=0)
            for a, b in zip(states[:2], states[2:], strict=True)
        ]
        assert_close([one.outputs.score for one in found], expected)
        with pytest.raises(RequestError, match="got 2 and 3"):
            llm.score(TEXTS[:2], TEXTS[:3], **QUIET)
        with pytest.raises(UnsupportedModelError, match="no classification head"):
            llm.classify(TEXTS, **QUIET)


# --- per token, and layers after the pooling ------------------------------------------------------


close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=0)


def encode(llm, task, prompts, params=None):
    ask = functools.partial(llm._pools.encode, task)
    found = llm._pool(ask, prompts, pooling_params=params, use_tqdm=False)
    return [one.outputs.data for one in found]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classes")
    return directory, make_pooled(directory, "classes", num_labels=3)


def test_token_tasks_have_one_result_per_token(classes):
    """Prompts are prefilled in chunks, some of them in one batch."""
    directory, model = classes
    with LLM(directory, **OPTIONS) as llm:
        raw = encode(llm, "token_embed", PROMPTS, PoolingParams(normalize=False, dimensions=5))
        whole = encode(llm, "token_embed", PROMPTS)
        probs = encode(llm, "token_classify", PROMPTS)
        last = encode(llm, "classify", PROMPTS)
        logits = [one.outputs.data for one in llm.reward(PROMPTS, use_tqdm=False)]
        for i, prompt in enumerate(PROMPTS):
            expected = hidden_states(model, prompt)
            close(raw[i], expected[:, :5], atol=1e-4)
            close(whole[i], torch.nn.functional.normalize(expected, dim=-1))
            close(probs[i], model.score(expected).softmax(-1))
            close(last[i], probs[i][-1], atol=1e-6)
            close(logits[i], model.score(expected)[-1], atol=1e-4)
        for task in ("plugin", None, "score"):
            with pytest.raises(RequestError, match="pooling_task must be one of embed, classify"):
                encode(llm, task, PROMPTS)


def test_dense_layers_after_the_pooling_are_applied(tmp_path):
    """Two dense layers, then truncation and normalization; a cosine is computed from the result."""
    model = make_pooled(tmp_path, "model")
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    describe(tmp_path, {"pooling_mode": "mean"}, kinds)
    layers = [torch.nn.Linear(64, 24), torch.nn.Linear(24, 12, bias=False)]
    acts = [torch.nn.Tanh(), torch.nn.Identity()]
    modules = json.loads((tmp_path / "modules.json").read_text())
    for place, layer, act in zip((2, 3), layers, acts, strict=True):
        modules[place]["path"] = f"{place}_Dense"
        (tmp_path / f"{place}_Dense").mkdir(exist_ok=True)
        name = f"torch.nn.modules.x.{type(act).__name__}"
        config = {"activation_function": name, "in_features": 0, "bias": layer.bias is not None}
        (tmp_path / f"{place}_Dense" / "config.json").write_text(json.dumps(config))
        weights = {f"linear.{key}": value.detach() for key, value in layer.named_parameters()}
        save_file(weights, tmp_path / f"{place}_Dense" / "model.safetensors")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with torch.no_grad(), LLM(tmp_path, **OPTIONS) as llm:
        means = [hidden_states(model, prompt).mean(0) for prompt in PROMPTS]
        expected = [acts[1](layers[1](acts[0](layers[0](mean)))) for mean in means]
        found = llm.embed(PROMPTS, use_tqdm=False)
        close(
            [one.outputs.embedding for one in found],
            [torch.nn.functional.normalize(one, dim=0) for one in expected],
        )
        short = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
        close(
            [one.outputs.embedding for one in short],
            [torch.nn.functional.normalize(one[:4], dim=0) for one in expected],
        )
        with pytest.raises(RequestError, match="dimensions must be at most 12, got 13"):
            llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=13))
        texts = [llm.tokenizer.decode(prompt) for prompt in PROMPTS[1:3]]
        vectors = [np.array(v.outputs.embedding) for v in llm.embed(texts, use_tqdm=False)]
        (score,) = llm.score(*texts, use_tqdm=False)
        close(score.outputs.score, vectors[0] @ vectors[1])


def test_unsupported_dense_layers_raise(tmp_path):
    make_pooled(tmp_path, "model")
    describe(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"))
    folder = tmp_path / "2_Dense"
    save_file({"linear.weight": torch.ones(3, 64)}, folder / "model.safetensors")
    for config, error in (
        ({"activation_function": "torch.nn.GELU"}, "activation 'GELU' is not implemented"),
        ({"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings'"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(UnsupportedModelError, match=error):
            llm.embed(["a"], use_tqdm=False)
    save_file({"weight": torch.ones(3, 64)}, folder / "model.safetensors")
    with (
        LLM(tmp_path, **OPTIONS) as llm,
        pytest.raises(UnsupportedModelError, match="tensors weight;"),
    ):
        llm.embed(["a"], use_tqdm=False)


def test_a_chat_template_joins_a_pair(tmp_path):
    make_pooled(tmp_path, "lm")
    words, pair = ("n", "y"), ("a dog", "the {query} cat")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} | {% endfor %}"
    template += "{% if add_generation_prompt %}!{% endif %}?"
    with LLM(tmp_path, **OPTIONS) as llm:
        (found,) = llm.score(*pair, answers=words, chat_template=template, use_tqdm=False)
        text = f"query: {pair[0]} | document: {pair[1]} | ?"
        assert found.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
        plain = "query: {query} | document: {document} | ?"
        (expected,) = llm.score(*pair, answers=words, template=plain, use_tqdm=False)
        close(found.outputs.score, expected.outputs.score, atol=1e-6)
        with pytest.raises(RequestError, match="embeds each text"):
            llm.score(*pair, chat_template=template)
