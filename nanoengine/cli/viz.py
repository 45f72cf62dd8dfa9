"""`nanoengine viz TRACE`: writes a trace as one HTML page, to step through a run.

The page contains all that it needs, and opens from disk in any browser of 2023 or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from nanoengine.cli.options import TraceFile
from nanoengine.errors import ConfigError
from nanoengine.observe.trace_reader import read_trace
from nanoengine.observe.viewer.page import page, token_decoder
from nanoengine.observe.viewer.page_data import page_data
from nanoengine.settings.checks import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class VizArgs:
    """Writes a page that shows a trace: steps, requests and blocks, to play and to step through.

    Attributes:
        recording: File of --trace.
        output: The page; None: next to the trace, as .html.
        steps: Show the steps from A to before B: A:B, where A and B are optional.
        tokenizer: Directory of a model, whose tokenizer decodes the tokens; None: the tokenizer of
            the run, if it is on this machine.
    """

    recording: TraceFile
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    steps: str = ":"
    tokenizer: Path | None = None


def main(args: VizArgs) -> None:
    """Writes the page and prints its path.

    Raises:
        TraceError: the file is not a trace, or has none of the steps.
        ConfigError: the tokenizer can't be read, or the steps are invalid.
    """
    first, colon, end = args.steps.partition(":")
    if not colon or not f"0{first}{end}".isdecimal():
        raise ConfigError(f"--steps must be A:B, got {quoted(args.steps)}")
    steps = int(first or 0), int(end) if end else None
    recording = read_trace(args.recording)
    text_of = token_decoder(recording, args.tokenizer)
    data = page_data(recording, steps=steps, text_of=text_of, title=args.recording.name)
    uncompressed = args.recording.with_name(args.recording.name.removesuffix(".gz"))
    path = args.output or uncompressed.with_suffix(".html")
    path.write_text(page(data), encoding="utf-8")
    for note in data.meta["thinned"]:
        print(f"note: {note}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; open it in a browser")
