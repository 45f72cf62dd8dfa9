"""docs/equality.md names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "equality.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = {*re.findall(r"`(test_\w+)`", PAGE)}
    assert len(named) > 12
    assert named <= {*re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
