"""`nanoengine embed`: a matrix or a table with one row per text."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine import LLM, PoolingParams
from nanoengine.assets import demo_model_path
from nanoengine.cli import main as cli

TEXTS = ["Tom had a dog.", "One day the sun was hot."]
ALL = "\n".join(TEXTS)


def run(tmp_path, output, *options, text=ALL):
    source = tmp_path / "texts.txt"
    source.write_text(text)
    command = ["embed", "demo", str(source), "--output", str(tmp_path / output)]
    return cli.main([*command, "--num-kv-blocks", "64", *options])


def test_a_matrix_has_the_vectors_of_the_api(tmp_path):
    params = PoolingParams(dimensions=16, pooling="mean")
    with LLM(demo_model_path(), num_kv_blocks=64) as llm:
        expected = llm.embed(TEXTS, pooling_params=params, use_tqdm=False)
    assert run(tmp_path, "v.npy", "--dimensions", "16", "--pooling", "mean") == 0
    found = np.load(tmp_path / "v.npy")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [output.outputs.embedding for output in expected], atol=1e-5)


def test_embed_shows_no_output_speed(tmp_path, capsys):
    """Regression: it showed "output 0 tok/s"."""
    assert run(tmp_path, "v.npy") == 0
    stderr = capsys.readouterr().err
    assert "prefill" in stderr and "output" not in stderr


def test_a_text_without_a_vector_is_reported_and_other_texts_have_vectors(tmp_path, capsys):
    text = f"{TEXTS[0]}\n{'word ' * 50}\n{TEXTS[1]}"
    assert run(tmp_path, "v.npy", "--max-model-len", "32", text=text) == 1
    assert "texts.txt:2: the prompt has" in capsys.readouterr().err
    found = np.load(tmp_path / "v.npy")
    assert np.isnan(found).all(1).tolist() == [False, True, False]
    assert run(tmp_path, "v.npy", "--max-model-len", "32", "--truncate", text=text) == 0
    assert np.isfinite(np.load(tmp_path / "v.npy")).all()


@pytest.mark.extra
def test_a_table_has_one_row_per_text(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    text = f"{TEXTS[0]}\n{'word ' * 50}\n{TEXTS[1]}"
    assert run(tmp_path, "v.parquet", "--max-model-len", "32", text=text) == 1
    table = parquet.read_table(tmp_path / "v.parquet").to_pylist()
    assert [row["row"] for row in table] == [0, 1, 2]
    assert table[0]["error"] is None and len(table[0]["embedding"]) == 192
    assert table[1]["embedding"] is None and "tokens" in table[1]["error"]
