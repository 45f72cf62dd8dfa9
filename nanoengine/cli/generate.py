"""`nanoengine generate`: prompts from the command line, a file or stdin; text or JSON lines out.

This module runs prompts from the command line; the answer to a single prompt is streamed to a
terminal. A file, or stdin, is run as a job of `nanoengine batch` (cli/batch.py).
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from nanoengine.cli import batch
from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields, subset
from nanoengine.errors import ConfigError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.jobs.paths import STDOUT
from nanoengine.jobs.records import Recorder, parsed_fields
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
        prompt: A prompt; may be given several times. Without --prompt and --file, prompts are read
            from stdin.
        file: A file of prompts, in any format that `nanoengine batch` supports.
        output: Write the records for --file to this file, in the same order; the same command
            resumes.
        chat: Treat each prompt as a user message, and apply the model's chat template.
        system: System message before each prompt; needs --chat.
        reasoning_parser: Parse the model's reasoning: vLLM's name of the parser, or auto.
        tool_call_parser: Parse tool calls in answers: vLLM's name of the parser, or auto.
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
    sampling = sampling_fields(args.sampling)
    options = RowOptions(**subset(RowOptions, args) | {"sampling": sampling})
    if not args.prompt:
        return batch.main(_as_batch(args))
    if args.file is not None or args.output is not None:
        raise ConfigError("--file and --output can't be used with --prompt, which prints to stdout")
    if args.watch:
        batch.require_terminal()
    from nanoengine.llm import LLM

    with LLM(**engine_options(args)) as llm, contextlib.ExitStack() as stack:
        print("sampling:", sampling_line(llm.config, llm.info, options.sampling), file=sys.stderr)
        reader = RowReader(options, *batch.model_reader_args(llm, args))
        tasks = [
            reader.task(Line(i, PROMPTS, i + 1, {"prompt": prompt}))
            for i, prompt in enumerate(args.prompt)
        ]
        if args.watch:
            from nanoengine.observe.watch import Watch

            watch = Watch(lambda: f"{llm.engine.num_unfinished} of {len(tasks)} prompts are left")
            stack.callback(watch.close)
            llm.engine.observers.append(watch)
        elif is_terminal() and len(tasks) == tasks[0].params.n == 1 and not options.parses_output:
            (task,) = tasks
            prompt = Row(task.prompt, sampling_params=task.params, key=task.key)
            for delta in llm.stream(prompt, kind="delta"):
                print(delta.outputs[0].text, end="", flush=True)
            print()
            return 0
        results: dict[int, Any] = {}
        work = Work(tasks, lambda task, result: results.update({task.row: result}))
        work.run(lambda rows: llm.stream(rows, on_error="record"))
    recorder, as_text = Recorder(args.model), is_terminal()
    for task in tasks:
        result = results[task.row]
        sys.stdout.write(_text(task, result) if as_text else recorder.record(task, result).decode())
    return int(work.counts.failed > 0)


def is_terminal() -> bool:
    """Whether stdout is a terminal; then answers are printed as text, otherwise as records."""
    return sys.stdout.isatty()


def _as_batch(args: GenerateArgs) -> batch.BatchArgs:
    """The batch job for a file or stdin."""
    if args.file is None and sys.stdin.isatty():
        raise ConfigError("no prompts: give --prompt TEXT or --file PATH, or lines on stdin")
    if args.file is None and args.output is not None:
        raise ConfigError("--output needs --file")
    job = {
        "inputs": (STDIN if args.file is None else str(args.file),),
        "input_format": "txt" if args.file is None else None,
        "output": STDOUT if args.output is None else str(args.output),
        "sort_output": args.output is not None,
    }
    return batch.BatchArgs(**subset(batch.BatchArgs, args) | job)


def _text(task: Task, result: Any) -> str:
    if isinstance(result, RowError):
        return f"[{task.row}] {task.columns['prompt']!r}\n    error: {result}\n"
    parser = task.output_parser
    output = result if parser is None else parser.parse(result, task.key)
    lines = [f"[{task.row}] {output.prompt!r}"]
    for completion in output.outputs:
        lines += (f"    {name}: {value!r}" for name, value in parsed_fields(completion).items())
        lines.append(f"    {completion.text!r}")
    return "\n".join(lines) + "\n"
