"""`nanoengine explain`: describes a traced run, a request or a step in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.cli.options import TraceFile
from nanoengine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainArgs:
    """Explains a trace: the five main facts, the history of a request, or one step.

    examples:
      nanoengine explain run.trace.gz
      nanoengine explain run.trace.gz --request 7
      nanoengine explain run.trace.gz --step 120

    Attributes:
        recording: File of --trace.
        request: Describe this request from its arrival to its end.
        step: Describe what this step did and why.
    """

    recording: TraceFile
    request: str | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.request is not None and self.step is not None:
            raise ConfigError("--request and --step can't be combined: give only one")


def main(args: ExplainArgs) -> None:
    """Prints one sentence per line.

    Raises:
        TraceError: the file is not a trace, or has no such request or step.
    """
    from nanoengine.observe.explain import explain_recording
    from nanoengine.observe.trace_reader import read_trace

    narrative = explain_recording(read_trace(args.recording), step=args.step)
    if args.request is not None:
        lines = narrative.request_lines(args.request)
    else:
        lines = narrative.run_lines() if args.step is None else narrative.step_lines()
    print("\n".join(lines))
