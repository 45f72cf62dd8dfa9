"""Files that come with the package: the demo model, so that a first run downloads nothing."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Directory of the demo model, a Hugging Face checkpoint like any other."""
    return Path(__file__).parent / "demo-model"
