"""`nanoengine compare`: its figures against figures from transformers' logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine.cli import main as cli
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level, text_checkpoint

TEXTS = ["The harbour was quiet.", "1 + 1 = 2, and 2 + 2 = 4", "def f(x):\n    return x"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints with equal shapes and tokenizer and different random weights."""
    return [text_checkpoint(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(2)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def run_compare(tmp_path: Path, *args: str) -> list[dict[str, Any]]:
    report = tmp_path / "report.json"
    assert cli.main(["compare", *args, "--json", str(report), "--answer-tokens", "4"]) == 0
    return json.loads(report.read_text())["models"]


def distributions(model: Path, ids: list[int]) -> torch.Tensor:
    """Returns log-probabilities by transformers, [T - 1, V] float64."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return loaded(torch.tensor([ids])).logits[0, :-1].double().log_softmax(1)


def test_figures_equal_figures_from_transformers_logits(
    models: list[Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = map(str, models)
    same, other = run_compare(
        tmp_path, first, first, f"{second}@dtype=float32", "--texts", str(texts)
    )
    assert same["kl_max"] < 1e-9 and same["same_best_token"] == 1 and same["answers_changed"] == 0
    kl, matches, loss = [], [], 0.0
    for text in TEXTS:
        ids = byte_level().encode(text)
        p, q = (distributions(model, ids) for model in models)
        kl.append((p.exp() * (p - q)).sum(1))
        matches.append((p.argmax(1) == q.argmax(1)).double())
        loss -= q.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    every = torch.cat(kl)
    assert other["positions"] == len(every)
    assert other["kl_mean"] == pytest.approx(every.mean().item(), rel=1e-4)
    assert other["kl_max"] == pytest.approx(every.max().item(), rel=1e-4)
    assert other["same_best_token"] == pytest.approx(torch.cat(matches).mean().item())
    assert other["perplexity"] == pytest.approx(math.exp(loss / len(every)), rel=1e-4)
    worst = other["worst"][0]
    assert kl[worst["text"]][worst["position"]].item() == pytest.approx(worst["kl"], rel=1e-4)
    assert other["answers_changed"] == len(TEXTS)
    shown = capsys.readouterr().out
    assert shown.count("lossy") == 1 and "KL mean" in shown and f"{second}@dtype=float32" in shown


def test_settings_after_the_path_reach_the_engine(
    models: list[Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows = str(models[0]), str(texts)
    asked = f"{model}@quantization=int8,max_num_seqs=2"
    exact, rounded = run_compare(tmp_path, model, model, asked, "--texts", rows)
    assert exact["kl_mean"] < 1e-9 < 1e-7 < rounded["kl_mean"] < 0.1
    assert cli.main(["compare", model, f"{model}@quantisation=int8", "--texts", rows]) == 2
    assert "quantisation" in capsys.readouterr().err


def test_chats_are_rendered_and_other_tokenizers_raise(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello there"}]}) + "\n")
    (found,) = run_compare(tmp_path, str(models[0]), str(models[1]), "--texts", str(rows))
    messages = [{"role": "user", "content": "Hello there"}]
    rendered = byte_level().render_chat(messages, chat_template=CHAT_TEMPLATE)
    assert found["positions"] == len(byte_level().encode(rendered, add_special_tokens=False)) - 1
    assert cli.main(["compare", str(models[0]), "demo", "--texts", str(rows)]) == 2
    assert "tokens" in capsys.readouterr().err
