"""Embeddings and scores against sentence-transformers, on checkpoints that it has written."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine import LLM, PoolingParams
from tests.support.pooled_checkpoints import make_pooled

pytestmark = pytest.mark.extra

TEXTS = ["The little girl went home", "a dog", "é 你好", "Once upon a time there was. " * 8, "x"]


@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("normalized", [True, False])
def test_embeddings_equal_sentence_transformers(tmp_path, mode, normalized):
    peer = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    make_pooled(tmp_path / "base", "model")
    layers = [modules.Transformer(str(tmp_path / "base"), max_seq_length=48)]
    layers += [modules.Pooling(64, pooling_mode=mode)]
    layers += [modules.Normalize()] if normalized else []
    model = peer.SentenceTransformer(modules=layers, device="cpu")
    model.tokenizer.pad_token = "</s>"
    model.save(str(tmp_path / "whole"))
    expected = model.encode(TEXTS)
    cut = PoolingParams(truncate_prompt_tokens=-1)
    with LLM(tmp_path / "whole", num_kv_blocks=64) as llm:
        found = llm.embed(TEXTS, pooling_params=cut, use_tqdm=False)
    assert len(found[3].prompt_token_ids) == 48
    np.testing.assert_allclose([one.outputs.embedding for one in found], expected, atol=2e-5)


def test_scores_equal_a_cross_encoder_of_sentence_transformers(tmp_path):
    peer = pytest.importorskip("sentence_transformers")
    make_pooled(tmp_path, "classes", num_labels=1)
    model = peer.CrossEncoder(str(tmp_path), device="cpu")
    model.tokenizer.pad_token = "</s>"
    expected = model.predict([(TEXTS[0], text) for text in TEXTS[1:]], batch_size=1)
    with LLM(tmp_path, num_kv_blocks=64) as llm:
        found = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-5)
