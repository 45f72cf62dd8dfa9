"""`nanoengine generate`: prompts from the command line, a file or stdin; text or JSON lines out.

This module answers prompts of the command line; a single one is streamed to a terminal. A file, or
stdin, is run as a job of `nanoengine batch` (cli/batch.py), without most of its options.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from nanoengine.cli import batch
from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields, shared
from nanoengine.errors import ConfigError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.jobs.paths import STDOUT
from nanoengine.jobs.records import Recorder, parts
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import STDIN, Input, Line, RowError
from nanoengine.jobs.work import Work
from nanoengine.text.prompt_forms import Row

PROMPTS = Input(name="--prompt", form="txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs(EngineArgs):
    """Completes prompts from the command line, from a file, or from stdin, one per line.

    examples:
      nanoengine generate demo --prompt "Once upon a time"
      nanoengine generate demo --chat --prompt "Tell a story." --temperature 0 --n 1
      nanoengine generate Qwen/Qwen3-0.6B --file prompts.txt --output answers.jsonl

    Attributes:
        prompt: A prompt; may be given several times. Without any, and without a file, prompts are
            read from stdin.
        file: Prompts from a file, in any form that `nanoengine batch` supports.
        output: Write the records of a file to this file, in the same order; the same command
            resumes.
        chat: Treat each prompt as a user's message and apply the model's chat template.
        system: System message before each chat.
        reasoning_parser: Parse the model's reasoning: a name from vLLM, or auto.
        tool_call_parser: Parse tool calls in answers: a name from vLLM, or auto.
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
        ConfigError: there are no prompts, a file or a value is invalid; before the model loads.
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
        print("sampling:", sampling_line(llm.config, llm.info, rows.sampling), file=sys.stderr)
        reader = RowReader(rows, *batch.of_model(llm, args))
        tasks = [
            reader.task(Line(i, PROMPTS, i + 1, {"prompt": prompt}))
            for i, prompt in enumerate(args.prompt)
        ]
        if args.watch:
            from nanoengine.observe.watch import Watch

            shown = Watch(lambda: f"{llm.engine.num_unfinished} of {len(tasks)} prompts are left")
            stack.callback(shown.close)
            llm.engine.observers.append(shown)
        elif to_a_terminal() and len(tasks) == tasks[0].params.n == 1 and not rows.takes_apart:
            (one,) = tasks
            prompt = Row(one.prompt, sampling_params=one.params, key=one.key)
            for growing in llm.stream(prompt, kind="delta"):
                print(growing.outputs[0].text, end="", flush=True)
            print()
            return 0
        results: dict[int, Any] = {}
        work = Work(tasks, lambda task, result: results.update({task.row: result}))
        work.run(lambda rows: llm.stream(rows, on_error="record"))
    recorder, is_read = Recorder(args.model), to_a_terminal()
    for task in tasks:
        result = results[task.row]
        told = _text(task, result) if is_read else recorder.record(task, result).decode()
        sys.stdout.write(told)
    return int(work.counts.failed > 0)


def to_a_terminal() -> bool:
    """Whether standard output is a terminal, so that a person reads it."""
    return sys.stdout.isatty()


def _as_batch(args: GenerateArgs) -> batch.BatchArgs:
    """The batch job for a file or stdin."""
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


def _text(task: Task, result: Any) -> str:
    if isinstance(result, RowError):
        return f"[{task.row}] {task.columns['prompt']!r}\n    error: {result}\n"
    output = result if task.form is None else task.form.parse(result, task.key)
    lines = [f"[{task.row}] {output.prompt!r}"]
    for one in output.outputs:
        lines += (f"    {name}: {part!r}" for name, part in parts(one).items())
        lines.append(f"    {one.text!r}")
    return "\n".join(lines) + "\n"
