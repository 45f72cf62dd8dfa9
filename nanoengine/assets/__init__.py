"""Files that come with the package: the demo model and texts, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Directory of the demo model, a Hugging Face checkpoint like any other."""
    return Path(__file__).parent / "demo-model"


def texts_path() -> Path:
    """Twenty short texts, one JSON object per line, which `nanoengine compare` runs on."""
    return Path(__file__).parent / "texts.jsonl"
