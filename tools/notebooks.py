"""Runs docs/notebooks and stores what each cell prints in it: python tools/notebooks.py

`tests/docs/test_site.py` compares the stored outputs with those of a new run. Outputs are text, so
no package of Jupyter is needed. As a hook of mkdocs (mkdocs.yml), this file makes a page of each
notebook, with its outputs.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"


def outputs_of(notebook: dict[str, Any]) -> list[str]:
    """Runs the code cells in order, and returns what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            outputs.append(printed.getvalue())
    return outputs


def stored_outputs(notebook: dict[str, Any]) -> list[str]:
    """What the code cells printed when the outputs were stored."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(t for o in cell["outputs"] for t in o["text"]) for cell in cells]


def markdown(notebook: dict[str, Any]) -> str:
    """A page with the cells of a notebook, and their outputs."""
    parts, outputs = [], iter(stored_outputs(notebook))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if output := next(outputs):
            parts.append(f"```text\n{output}```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds a page per notebook."""
    from mkdocs.structure.files import File

    for path in FOLDER.glob("*.ipynb"):
        text = markdown(json.loads(path.read_text("utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Called by mkdocs: links to a notebook lead to its page."""
    return text.replace(".ipynb)", ".md)")


def main() -> None:
    for path in FOLDER.glob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))
        outputs = iter(outputs_of(notebook))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                text = next(outputs).splitlines(keepends=True)
                stream = {"name": "stdout", "output_type": "stream", "text": text}
                cell["outputs"] = [stream] if text else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
