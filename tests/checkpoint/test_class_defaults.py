"""defaults.json equals the defaults of transformers; complete configs do not need it.

Only classes of the installed version of transformers are compared.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nanoengine.assets import demo_model_path
from nanoengine.checkpoint import config_reader
from nanoengine.checkpoint.config import load_model_config, parse_model_config

TOOL = Path(__file__).resolve().parents[2] / "tools" / "class_defaults.py"


def written() -> dict[str, dict[str, Any]]:
    """The content that the tool would write."""
    spec = importlib.util.spec_from_file_location("class_defaults", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


def test_the_file_equals_the_config_classes_of_transformers() -> None:
    expected, stored = written(), config_reader.class_defaults()
    assert len(expected) > 50
    assert {name: stored.get(name) for name in expected} == expected, (
        "run python tools/class_defaults.py"
    )


def test_a_complete_config_is_read_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("defaults.json was read")

    monkeypatch.setattr(config_reader, "class_defaults", fail)
    load_model_config(demo_model_path())
    raw = json.loads((Path(demo_model_path()) / "config.json").read_text(encoding="utf-8"))
    raw.pop("num_key_value_heads")
    with pytest.raises(AssertionError, match=r"defaults\.json was read"):
        parse_model_config(raw)
