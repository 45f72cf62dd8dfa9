"""Vectors and classes of each token, layers behind the pooling, templates of pairs."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanoengine import LLM, PoolingParams
from nanoengine.errors import RequestError, UnsupportedModelError
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.pooling import PooledParams
from tests.support.pooled_checkpoints import describe, make_pooled

OPTIONS = {"num_kv_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
RANDOM = torch.Generator().manual_seed(7)
PROMPTS = [torch.randint(5, 400, (n,), generator=RANDOM).tolist() for n in (1, 17, 70, 33)]
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=0)


def encode(llm, task, prompts, asked=None):
    ask = functools.partial(llm._pools.encode, task)
    found = llm._pool(ask, prompts, pooling_params=asked, use_tqdm=False)
    return [one.outputs.data for one in found]


def states(model, token_ids):
    return model.base_model(torch.tensor([token_ids])).last_hidden_state[0]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classes")
    return directory, make_pooled(directory, "classes", num_labels=3)


def test_each_token_has_its_vector_and_its_classes(classes):
    """Prompts run in chunks, some of them beside each other."""
    directory, model = classes
    with LLM(directory, **OPTIONS) as llm:
        raw = encode(llm, "token_embed", PROMPTS, PoolingParams(normalize=False, dimensions=5))
        whole = encode(llm, "token_embed", PROMPTS)
        probs = encode(llm, "token_classify", PROMPTS)
        last = encode(llm, "classify", PROMPTS)
        logits = [one.outputs.data for one in llm.reward(PROMPTS, use_tqdm=False)]
        for i, prompt in enumerate(PROMPTS):
            wanted = states(model, prompt)
            close(raw[i], wanted[:, :5], atol=1e-4)
            close(whole[i], torch.nn.functional.normalize(wanted, dim=-1))
            close(probs[i], model.score(wanted).softmax(-1))
            close(last[i], probs[i][-1], atol=1e-6)
            close(logits[i], model.score(wanted)[-1], atol=1e-4)
        for task in ("plugin", None, "score"):
            with pytest.raises(RequestError, match="pooling_task must be one of embed, classify"):
                encode(llm, task, PROMPTS)


def test_tokens_vectors_and_answers_run_side_by_side(tmp_path):
    model = make_pooled(tmp_path, "lm")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    kinds = [PooledParams(pooling=kind) for kind in ("all", "mean", "last", "all")]
    with LLM(tmp_path, **OPTIONS) as llm:
        alone = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        asked = [params for kind in kinds for params in (kind, greedy)]
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        mixed = llm.generate(prompts, asked, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in mixed[1::2]] == alone
        wanted = [states(model, prompt) for prompt in PROMPTS]
        close(mixed[0].pooled, wanted[0], atol=1e-4)
        close(mixed[2].pooled, wanted[1].mean(0), atol=1e-4)
        close(mixed[4].pooled, wanted[2][-1], atol=1e-4)
        close(mixed[6].pooled, wanted[3], atol=1e-4)


def test_layers_behind_the_pooling(tmp_path):
    """Two of them, then cut and scaled; a cosine is that of what they give."""
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
        means = [states(model, prompt).mean(0) for prompt in PROMPTS]
        wanted = [acts[1](layers[1](acts[0](layers[0](mean)))) for mean in means]
        found = llm.embed(PROMPTS, use_tqdm=False)
        close(
            [one.outputs.embedding for one in found],
            [torch.nn.functional.normalize(one, dim=0) for one in wanted],
        )
        short = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
        close(
            [one.outputs.embedding for one in short],
            [torch.nn.functional.normalize(one[:4], dim=0) for one in wanted],
        )
        with pytest.raises(RequestError, match="dimensions must be at most 12, got 13"):
            llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=13))
        texts = [llm.tokenizer.decode(prompt) for prompt in PROMPTS[1:3]]
        vectors = [np.array(v.outputs.embedding) for v in llm.embed(texts, use_tqdm=False)]
        (score,) = llm.score(*texts, use_tqdm=False)
        close(score.outputs.score, vectors[0] @ vectors[1])


def test_layers_of_another_form_are_refused(tmp_path):
    make_pooled(tmp_path, "model")
    describe(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"))
    folder = tmp_path / "2_Dense"
    save_file({"linear.weight": torch.ones(3, 64)}, folder / "model.safetensors")
    for config, said in (
        ({"activation_function": "torch.nn.GELU"}, "activation 'GELU' is not implemented"),
        ({"module_input_name": "token_embeddings"}, "Dense module of 'token_embeddings'"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(UnsupportedModelError, match=said):
            llm.embed(["a"], use_tqdm=False)
    save_file({"weight": torch.ones(3, 64)}, folder / "model.safetensors")
    with (
        LLM(tmp_path, **OPTIONS) as llm,
        pytest.raises(UnsupportedModelError, match="with weight;"),
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
        (wanted,) = llm.score(*pair, answers=words, template=plain, use_tqdm=False)
        close(found.outputs.score, wanted.outputs.score, atol=1e-6)
        with pytest.raises(RequestError, match="gives a vector for each"):
            llm.score(*pair, chat_template=template)


def test_modules_in_another_order_are_named(classes, tmp_path):
    shutil.copytree(classes[0], tmp_path, dirs_exist_ok=True)
    describe(tmp_path, {}, ("Transformer", "Dense", "Pooling"))
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(UnsupportedModelError, match="Dense,"):
        llm.embed(["a"], use_tqdm=False)
