"""Files of a checkpoint that may hold, or be, anything: what they are, and what to do about it.

Everyone may import this file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from nanoengine.settings.checks import brief

GGUF = ".gguf"
"""How the names of GGUF files usually end."""

WRONG_STARTS = {
    (b"version https://git-lfs",): "it is a Git LFS pointer: run `git lfs pull` in its folder",
    (b"<!doctype", b"<html"): "it is a web page: download the file again",
    (b"\xef\xbb\xbf", b"\xff\xfe"): "it has a byte order mark: save it as UTF-8 without one",
}
"""First bytes of files of a checkpoint that are not what their names say -> what to do."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file: one that starts with these four bytes, whatever its name, or
    one of that name, whose reader then says what is wrong."""
    if path.suffix.lower() == GGUF or not os.path.isfile(path):  # Why: a FIFO would be waited for.
        return os.path.isfile(path)
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        error: the file can't be read, is a FIFO or another special file, which would be waited for,
            or holds anything else than an object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path} is no regular file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{path} can't be read: {reason}") from reason
    except ValueError as reason:
        raise error(f"{path} is not valid JSON: {wrong_content(path) or reason}") from reason
    except RecursionError as reason:
        raise error(f"{path} is nested too deeply") from reason
    if not isinstance(content, dict):
        raise error(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def wrong_content(path: Path) -> str:
    """Why a file can't hold what its name says, and what to do; "" if its first bytes may be right.

    Why: parsers only report that the first byte is wrong. Source: the specification of Git LFS.
    """
    with open(path, "rb") as file:
        start = file.read(64).lower()
    found = (why for wrong, why in WRONG_STARTS.items() if start.startswith(wrong))
    return next(found, "") if start else "it is empty: download it again"


def unreadable(path: Path, reason: Exception, error: type[Exception]) -> Exception:
    """The error to raise for a file that another library can't parse, or the system not read."""
    why = "" if isinstance(reason, OSError) else wrong_content(path)
    return error(f"can't read {path}: {why or brief(reason)}")
