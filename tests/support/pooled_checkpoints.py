"""Tiny random embedding and classification checkpoints with a tokenizer, from transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints import make_config
from tests.support.text_fixtures import byte_level

KINDS = {
    "model": transformers.AutoModel,
    "classes": transformers.AutoModelForSequenceClassification,
    "lm": transformers.AutoModelForCausalLM,
}


def make_pooled(directory: Path, kind: str, family: str = "qwen3", **fields: Any) -> Any:
    """Writes one of `KINDS` and returns its model."""
    config = make_config(family, vocab_size=512, pad_token_id=0, **fields)
    torch.manual_seed(0)
    model = KINDS[kind].from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.save_pretrained(directory)
    byte_level().backend.save_pretrained(directory)
    return model


def describe(
    directory: Path, pooling: dict[str, Any], kinds: tuple[str, ...] = ("Transformer", "Pooling")
) -> None:
    """Writes modules.json, and the config of the second module."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (directory / module["path"]).mkdir(exist_ok=True)
        (directory / module["path"] / "config.json").write_text(json.dumps(pooling))


def set_keys(path: Path, **keys: Any) -> None:
    """Changes keys of a JSON file; creates it if it is missing."""
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | keys))
