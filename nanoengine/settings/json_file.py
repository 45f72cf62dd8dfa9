"""read_object: a JSON object out of a file that may hold, or be, anything.

Called by whoever reads a checkpoint's small files; everyone may import this one.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any


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
        raise error(f"{path} is not valid JSON: {reason}") from reason
    except RecursionError as reason:
        raise error(f"{path} is nested too deeply") from reason
    if not isinstance(content, dict):
        raise error(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
