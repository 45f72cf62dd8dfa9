"""Suggestions for error messages if a model is not found; and weight files without an index.

Called by `find.py` if a path is missing, and by `files.py` if the index is missing.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from nanoengine.errors import WeightLoadError
from nanoengine.settings.checks import join_names
from nanoengine.settings.files import GGUF

SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
"""The name of one file of a set; numbers start at 1."""


def files_without_index(directory: Path) -> list[Path]:
    """The files of numbered sets, or else all safetensors files except adapters.

    Raises:
        WeightLoadError: files of a set are missing.
    """
    files = [p for p in sorted(directory.glob("*.safetensors")) if p.name[:8] != "adapter_"]
    expected = {
        f"{name['stem']}-{number + 1:05}-of-{name['count']}.safetensors"
        for path in files
        if (name := SHARD.fullmatch(path.name))
        for number in range(int(name["count"]))
    }
    if missing := sorted(expected - {path.name for path in files}):
        raise WeightLoadError(
            f"{directory} has no model.safetensors.index.json and lacks {join_names(missing)}"
        )
    return [path for path in files if not expected or path.name in expected]


def models_below(folder: Path) -> str:
    """The models in the subfolders of a folder, for an error message."""
    names = [f"{at}/{name}" for at in ("*", "*/*") for name in ("config.json", "*.gguf")]
    names += ["blobs/sha256-*", "*/snapshots"]  # ollama's files, and the hub's cache
    below = {str(p if p.suffix == GGUF else p.parent) for one in names for p in folder.glob(one)}
    return f"; models in its subfolders: {join_names(sorted(below))}" if below else ""


def near_names(path: Path) -> str:
    """Similar names in the nearest existing directory of a missing path, for an error message."""
    while not os.path.isdir(path.parent):
        path = path.parent
    wanted, names = path.name.lower()[:255], {p.name.lower(): p for p in path.parent.glob("*")}
    near = [name for name in names if wanted and name.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, names)
    return f"; did you mean {join_names([str(names[name]) for name in sorted(near)])}?" * bool(near)
