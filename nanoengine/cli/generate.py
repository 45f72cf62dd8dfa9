"""`nanoengine generate`: prompts from the command line, a file or stdin; text or JSON lines out.

Prompts of the command line are answered here: one to a terminal is shown as it grows. A file, or
stdin, is a job of `nanoengine batch` (cli/batch.py) without most of its options.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import UseAppendAction

from nanoengine.cli import batch
from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields, shared
from nanoengine.errors import ConfigError
from nanoengine.jobs.paths import STDOUT
from nanoengine.jobs.records import Recorder, parts
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import STDIN, Input, Line, RowError
from nanoengine.text.prompt_forms import Row

if TYPE_CHECKING:
    from nanoengine.outputs import RequestOutput

PROMPTS = Input(name="--prompt", form="txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs(EngineArgs):
    """Completes prompts: of the command line, of a file, or of stdin, a line each.

    examples:
      nanoengine generate demo --prompt "Once upon a time"
      nanoengine generate demo --chat --prompt "Tell a story." --temperature 0 --n 1
      nanoengine generate Qwen/Qwen3-0.6B --file prompts.txt --output answers.jsonl

    Attributes:
        prompt: A prompt; may be given several times. Without any, and without a file, stdin has
            them.
        file: Prompts from a file, in any form that `nanoengine batch` takes.
        output: Write the records of a file to this one, in its order; the same command again
            resumes.
        chat: Take each prompt as a user's message and apply the model's chat template.
        system: System message before each chat.
        reasoning_parser: Take apart what the model thinks, by vLLM's names or auto.
        tool_call_parser: Take apart the calls in answers, by vLLM's names or auto.
        watch: Draw the KV pool and the running sequences on the terminal while they change.
    """

    prompt: UseAppendAction[tuple[str, ...]] = ()
    file: Path | None = None
    output: Path | None = None
    sampling: SamplingArgs = field(default_factory=SamplingArgs)  # type: ignore[valid-type]
    chat: bool = False
    system: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    watch: bool = False


def main(args: GenerateArgs) -> int:
    """Runs the command; returns 1 if any prompt failed, else 0.

    Raises:
        ConfigError: no prompts, a file or a value that can't be used; before the model loads.
    """
    asked = shared(RowOptions, args) | {"sampling": sampling_fields(args.sampling)}
    rows = RowOptions(**asked)
    if not args.prompt:
        return batch.main(_as_batch(args))
    if args.file is not None or args.output is not None:
        raise ConfigError("--file and --output are for files: --prompt is answered on stdout")
    if args.watch:
        batch.require_terminal()
    from nanoengine.llm import LLM

    with LLM(**engine_options(args)) as llm, contextlib.ExitStack() as stack:
        reader = RowReader(rows, *batch.of_model(llm, args))
        tasks = [
            reader.task(Line(i, PROMPTS, i + 1, {"prompt": prompt}))
            for i, prompt in enumerate(args.prompt)
        ]
        asked = [Row(t.prompt, sampling_params=t.params, key=t.key) for t in tasks]
        if args.watch:
            from nanoengine.observe.watch import Watch

            shown = Watch(lambda: f"{llm.engine.num_unfinished} of {len(asked)} prompts are left")
            stack.callback(shown.close)
            llm.engine.observers.append(shown)
        elif to_a_terminal() and len(tasks) == tasks[0].params.n == 1 and not rows.takes_apart:
            for growing in llm.stream(asked[0], kind="delta"):
                print(growing.outputs[0].text, end="", flush=True)
            print()
            return 0
        outputs = llm.generate(asked, use_tqdm=False, on_error="record")
    recorder, is_read = Recorder(args.model), to_a_terminal()
    for task, output in zip(tasks, outputs, strict=True):
        sys.stdout.write(_text(task, output) if is_read else _record(recorder, task, output))
    return int(any(output.error is not None for output in outputs))


def to_a_terminal() -> bool:
    """Whether a person reads standard output, and not a program."""
    return sys.stdout.isatty()


def _as_batch(args: GenerateArgs) -> batch.BatchArgs:
    """The job that a file, or stdin, is."""
    if args.file is None and sys.stdin.isatty():
        raise ConfigError("no prompts: give --prompt TEXT or --file PATH, or lines on stdin")
    if args.file is None and args.output is not None:
        raise ConfigError("--output has the records of a file: give --file too")
    job = {
        "inputs": (STDIN if args.file is None else str(args.file),),
        "input_format": "txt" if args.file is None else None,
        "output": STDOUT if args.output is None else str(args.output),
        "in_order": args.output is not None,
    }
    return batch.BatchArgs(**shared(batch.BatchArgs, args) | job)


def _record(recorder: Recorder, task: Task, output: RequestOutput) -> str:
    failed = RowError("invalid_request", output.error) if output.error is not None else None
    return recorder.record(task, failed or output).decode()


def _text(task: Task, output: RequestOutput) -> str:
    lines = [f"[{task.row}] {output.prompt!r}"]
    if task.form is not None:
        output = task.form.taken_apart(output, task.key)
    for one in output.outputs:
        lines += (f"    {name}: {part!r}" for name, part in parts(one).items())
        lines.append(f"    {one.text!r}" if one.error is None else f"    error: {one.error}")
    return "\n".join(lines) + "\n"
