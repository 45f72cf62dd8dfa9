"""Files that are part of the package, so that nothing is downloaded: the demo model and texts."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The directory of the demo model, a checkpoint in the format of transformers."""
    return Path(__file__).parent / "demo-model"


def texts_path() -> Path:
    """The file with the twenty short texts of `nanoengine compare`, one JSON object per line."""
    return Path(__file__).parent / "texts.jsonl"
