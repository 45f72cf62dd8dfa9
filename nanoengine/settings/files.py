"""Checks of checkpoint files whose content may be wrong, with advice for the message.

Any file may import this one.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from nanoengine.settings.checks import truncate

GGUF = ".gguf"
"""The usual extension of GGUF files."""

WRONG_STARTS = {
    (b"version https://git-lfs",): "it is a Git LFS pointer: run `git lfs pull` in its folder",
    (b"<!doctype", b"<html"): "it is a web page: download the file again",
    (b"\xef\xbb\xbf", b"\xff\xfe"): "it has a byte order mark: save it as UTF-8 without one",
}
"""First bytes of checkpoint files whose content does not match their names -> what to do."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file: by its extension, or by its first four bytes. A file with the
    extension but other content is rejected by the reader."""
    if path.suffix.lower() == GGUF or not os.path.isfile(path):  # Why: a FIFO would block.
        return os.path.isfile(path)
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        error: the file can't be read, is not a regular file (reading a FIFO would block), or its
            content is not an object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path} is not a regular file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{path} can't be read: {reason}") from reason
    except ValueError as reason:
        raise error(f"{path} is not valid JSON: {wrong_content(path) or reason}") from reason
    except RecursionError as reason:
        raise error(f"{path} is nested too deeply") from reason
    if not isinstance(content, dict):
        raise error(f"{path} must contain a JSON object, got {type(content).__name__}")
    return content


def wrong_content(path: Path) -> str:
    """Why a file's content does not match its name, and what to do; "" if its start may be right.

    Why: parsers only report that the first byte is wrong. Source: the specification of Git LFS.
    """
    with open(path, "rb") as file:
        start = file.read(64).lower()
    found = (why for wrong, why in WRONG_STARTS.items() if start.startswith(wrong))
    return next(found, "") if start else "it is empty: download it again"


def unreadable(path: Path, reason: Exception, error: type[Exception]) -> Exception:
    """The error to raise for a file that the system can't read or another library can't parse."""
    why = "" if isinstance(reason, OSError) else wrong_content(path)
    return error(f"can't read {path}: {why or truncate(reason)}")
