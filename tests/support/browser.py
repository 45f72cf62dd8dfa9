"""Chromium from the system, driven by playwright, for tests and screenshots of pages."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
TRIES = 3


def start_chromium(playwright: Playwright) -> Browser | str:
    """A browser without a GPU, or after three tries the reason why there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        return f"none of {', '.join(NAMES)} is installed"
    options: dict[str, Any] = {"executable_path": path, "args": ["--no-sandbox", "--disable-gpu"]}
    why = ""
    for _ in range(TRIES):
        try:
            return playwright.chromium.launch(**options)
        except Exception as error:  # Why all: a machine may lack libraries, memory or a /dev/shm.
            why = str(error).splitlines()[0]
    return f"{path} does not start, tried {TRIES} times: {why}"
