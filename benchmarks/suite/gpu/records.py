"""The context of a result (GPU, commit), and files that are always complete.

Called by `gpu_visit.py` and by its parts; needs only the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def card(*fields: str) -> dict[str, str]:
    """nvidia-smi's output for the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return {fields[0]: f"unknown: nvidia-smi gave {type(error).__name__}"}
    values = done.stdout.splitlines()[0].split(",")
    return {name: value.strip() for name, value in zip(fields, values, strict=False)}


def commit(root: Path = ROOT) -> str:
    """The commit of this checkout, and whether files differ from it; a copy without a repository
    has it in `.visit/commit` (`gpu_visit.py`)."""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"]
    written = root / ".visit" / "commit"
    if (root / ".git").exists():
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass  # no git, or a worktree whose repository is elsewhere
    return written.read_text().strip() if written.exists() else "unknown: no repository"


def write(path: Path, report: dict[str, Any]) -> None:
    """Replaces the file atomically: after an interruption, it has either the old or the new
    content."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
