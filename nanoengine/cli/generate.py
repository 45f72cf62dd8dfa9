"""`nanoengine generate`: prompts from the command line, a file or stdin; text or JSON lines out.

This module runs prompts from the command line; the answer to a single prompt is streamed to a
terminal. A file, or stdin, is run as a job of `nanoengine batch` (cli/batch.py).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from nanoengine.cli import batch
from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, subset
from nanoengine.errors import ConfigError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.jobs.paths import STDOUT
from nanoengine.jobs.progress import CUT
from nanoengine.jobs.records import PARSED_FIELDS, Recorder
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import STDIN, Input, Line
from nanoengine.jobs.work import Work
from nanoengine.settings.checks import truncate
from nanoengine.settings.config import EngineConfig
from nanoengine.text.chat_template import CHATS
from nanoengine.text.prompt_forms import Row

PROMPTS = Input(name="--prompt", form="txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs(EngineArgs):
    """Completes prompts from the command line, from a file, or from stdin, one per line.

    examples:
      nanoengine generate demo --prompt "Tell a story." --temperature 0
      nanoengine generate demo --raw --prompt "Once upon a time"
      nanoengine generate Qwen/Qwen3-0.6B --file prompts.txt --output answers.jsonl

    Attributes:
        prompt: A prompt; may be given several times. Without --prompt and --file, prompts are read
            from stdin.
        file: A file of prompts, in any format that `nanoengine batch` supports.
        output: Write the records for --file to this file, in the same order; the same command
            resumes.
        raw: Send prompts as they are; by default they are sent as chat messages if the model has a
            chat template.
        system: System message before each prompt that is sent as a user message.
        reasoning_parser: Parse the model's reasoning: vLLM's name of the parser, or auto.
        tool_call_parser: Parse tool calls in answers: vLLM's name of the parser, or auto.
        json: Print records also on a terminal; elsewhere they are always printed.
    """

    prompt: UseAppendAction[tuple[str, ...]] = ()
    file: Path | None = None
    output: Path | None = None
    sampling: SamplingArgs = field(default_factory=SamplingArgs)  # type: ignore[valid-type]
    raw: bool = False
    system: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    json: bool = False


def main(args: GenerateArgs) -> int:
    """Runs the command; returns 1 if any prompt failed, else 0.

    Raises:
        ConfigError: there are no prompts, a file or a value is invalid; before the model loads.
    """
    as_text = sys.stdout.isatty() and args.output is None and not args.json
    make_recorder = TextRecorder if as_text else Recorder
    if not args.prompt:
        return batch.main(_as_batch(args), make_recorder)
    if args.file is not None or args.output is not None:
        raise ConfigError("--file and --output can't be used with --prompt, which prints to stdout")
    config = EngineConfig.from_kwargs(**engine_options(args))
    options = batch.row_options(RowOptions, args, config)
    if options.chat:
        CHATS.begin()  # Why here: the process starts while the model loads.
    from nanoengine.llm import LLM

    with LLM(**engine_options(args)) as llm:
        print("sampling:", sampling_line(llm.config, llm.info, options.sampling), file=sys.stderr)
        reader = RowReader(options, *batch.model_reader_args(llm, args))
        tasks = [
            reader.task(Line(i, PROMPTS, i + 1, {"prompt": prompt}))
            for i, prompt in enumerate(args.prompt)
        ]
        if as_text and len(tasks) == tasks[0].params.n == 1 and not options.parses_output:
            (task,) = tasks
            prompt = Row(task.prompt, sampling_params=task.params, key=task.key)
            for delta in llm.stream(prompt, kind="delta"):
                print(delta.outputs[0].text, end="", flush=True)
            print()
            if delta.outputs[0].finish_reason == "length":
                print(f"[{CUT}]", file=sys.stderr)
            return 0
        results: dict[int, Any] = {}
        work = Work(tasks, lambda task, result: results.update({task.row: result}))
        work.run(lambda rows: llm.stream(rows, on_error="record"))
    recorder = make_recorder(args.model)
    for task in tasks:
        sys.stdout.write(recorder.record(task, results[task.row]).decode())
    return int(work.counts.failed > 0)


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


class TextRecorder(Recorder):
    """Makes readable text of the records of simple rows: the prompt, and the answers."""

    def record(self, task: Task, result: Any) -> bytes:
        line = super().record(task, result)
        if task.kind != "simple":
            return line
        record = json.loads(line)
        # Why the escape code: it erases the progress line of a job.
        lines = [f"\r\x1b[K[{task.row}] {truncate(record.get('prompt', ''))}"]
        if record["error"]:
            lines.append(f"error: {record['error']['message']}")
        for output in record["outputs"]:
            lines += [f"{n}: {output[n]}" for n in PARSED_FIELDS if n in output] + [output["text"]]
            lines += [f"[{CUT}]"] * (output["finish_reason"] == "length")
        return "\n".join([*lines, "", ""]).encode(errors="backslashreplace")
