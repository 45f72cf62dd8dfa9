"""`nanoengine trace`: a trace in a format that another program draws."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from nanoengine.cli.options import TraceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceArgs:
    """Converts a trace to the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    It has steps with their parts, a track a row, requests as flows, and counters.

    examples:
      nanoengine trace run.trace.gz --output run.json
      nanoengine trace run.trace.gz > run.json
      nanoengine trace run.trace.gz --output /dev/stdout | gzip > run.json.gz

    Attributes:
        recording: File of --trace.
        output: Where to write; without it standard output.
    """

    recording: TraceFile
    output: Path | None = None


def main(args: TraceArgs) -> None:
    """Converts.

    Raises:
        TraceError: the file is no trace.
    """
    from nanoengine.observe.chrome import chrome_events
    from nanoengine.observe.trace_reader import read_trace

    events = chrome_events(read_trace(args.recording))
    file = args.output and open(args.output, "w", encoding="utf-8")  # noqa: SIM115
    with file or nullcontext(sys.stdout) as sink:
        sink.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        sink.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        sink.write("\n]}\n")
