"""`nanoengine generate`: prompts from the command line or a file, text or JSON lines out.

One prompt to a terminal is shown as it grows. A file is read lazily and its results are written in
its order, so a job of any length runs in bounded memory; a bad line becomes a record with its error
and the line's number.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO

from tyro.conf import Positional, UseAppendAction, arg

from nanoengine.cli.options import EngineArgs, engine_options
from nanoengine.errors import ConfigError
from nanoengine.inputs import read_rows

if TYPE_CHECKING:
    from nanoengine.llm import LLM, Prompt
    from nanoengine.outputs import RequestOutput
    from nanoengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs(EngineArgs):
    """Completes prompts. All options of the engine may be given too."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Directory of a Hugging Face checkpoint, a hub id, or demo: the small bundled model."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """A prompt; may be given several times."""
    file: Path | None = None
    """Prompts from a file: .txt with one a line, or .jsonl with strings or prompt dicts."""
    output: Path | None = None
    """Write results to this file as JSON lines, in the order of the prompts; None: show them."""
    chat: bool = False
    """Take each prompt as a user's message and apply the model's chat template."""
    system: str | None = None
    """System message before each chat."""
    max_tokens: int = 256
    """Most tokens to generate for each prompt."""
    temperature: float | None = None
    """0 is greedy; None: the model's own default, as for the other sampling options."""
    top_k: int | None = None
    """Sample among the k most likely tokens."""
    top_p: float | None = None
    """Sample among the likeliest tokens that reach this probability."""
    min_p: float | None = None
    """Drop tokens less likely than this times the likeliest."""
    repetition_penalty: float | None = None
    """Above 1 discourages tokens that have occurred."""
    n: int = 1
    """Completions for each prompt."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """End at this string; may be given several times."""


def main(args: GenerateArgs) -> int:
    """Runs the command; returns 1 if any prompt failed, else 0.

    Raises:
        ConfigError: no prompts, or a file that can't be read or written; before the model loads.
    """
    check_prompts(args)
    with ExitStack() as files:
        source = files.enter_context(open_source(args.file)) if args.file is not None else None
        sink = open_sink(args.output, source) if args.output is not None else None
        if sink is not None:
            files.callback(_close, sink)
        from nanoengine.llm import LLM

        prompts = Prompts(args, source)
        with LLM(**engine_options(args)) as llm:
            params = sampling_params(args, llm.default_sampling_params)
            if sink is not None:
                return _write_records(llm, prompts, params, sink)
            if args.file is None and len(args.prompt) == 1 and args.n == 1:
                return _show_growing(llm, next(prompts), params)
            return _show_finished(llm, prompts, params)


def sampling_params(args: GenerateArgs, default: SamplingParams) -> SamplingParams:
    """The model's defaults with what the command line sets."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(default, n=args.n, max_tokens=args.max_tokens, stop=args.stop or None, **given)


def check_prompts(args: GenerateArgs) -> None:
    """Raises ConfigError unless there are prompts, in a form that is known."""
    if not args.prompt and args.file is None:
        raise ConfigError("no prompts: give --prompt TEXT or --file PATH")
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: only a chat template has a place for it")
    if args.file is not None:
        if args.file.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"file must end in .txt or .jsonl, got {str(args.file)!r}")
        if not args.file.is_file():
            raise ConfigError(f"file {str(args.file)!r} does not exist")


def open_source(path: Path) -> BinaryIO:
    """The file of prompts, opened for `read_rows`."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"file {str(path)!r} can't be read: {error.strerror}") from error


def open_sink(path: Path, source: BinaryIO | None) -> TextIO:
    """The file for records, what it held still in it; never the one that is read.

    A lone surrogate is written as JSON's escape, which is what `backslashreplace` makes of it.
    """
    if source is not None and path.exists() and os.path.samestat(path.stat(), _stat(source)):
        raise ConfigError(
            f"--output {str(path)!r} is the file of --file, which it would empty: write to another"
        )
    try:
        return path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as error:
        raise ConfigError(f"--output {str(path)!r} can't be written: {error.strerror}") from error


def _close(sink: TextIO) -> None:
    with suppress(OSError):  # Why: each record is flushed, so this can only fail once more.
        sink.close()


def _stat(file: BinaryIO | TextIO) -> os.stat_result:
    return os.fstat(file.fileno())


class Prompts:
    """The prompts of the command line, then those of the file, which is read as they are pulled.

    Attributes:
        lines: of the prompts pulled and not reported yet, in order: the number of each one's line
            in the file, None for one of the command line.
    """

    def __init__(self, args: GenerateArgs, source: BinaryIO | None) -> None:
        self.lines: deque[int | None] = deque()
        self._args = args
        self._rows = self._read(source)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        number, prompt = next(self._rows)
        self.lines.append(number)
        return _as_chat(self._args, prompt)

    def _read(self, source: BinaryIO | None) -> Iterator[tuple[int | None, object]]:
        for prompt in self._args.prompt:
            yield None, prompt
        if source is not None and self._args.file is not None:
            yield from read_rows(source, is_json=self._args.file.suffix == ".jsonl")


def _as_chat(args: GenerateArgs, prompt: Any) -> Any:
    """A string becomes a user's message where chats are asked for; dicts say what they are."""
    if not args.chat or not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return {"messages": [*system, {"role": "user", "content": prompt}]}


def _in_order(outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """Outputs in the order of their prompts; holds back those that finish before an earlier one."""
    early: dict[int, RequestOutput] = {}
    next_index = 0
    for output in outputs:
        early[output.index] = output
        while next_index in early:
            yield early.pop(next_index)
            next_index += 1


def _show_growing(llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    for output in llm.stream(prompt, params, kind="delta"):
        print(output.outputs[0].text, end="", flush=True)
    print()
    return 0


def _show_finished(llm: LLM, prompts: Prompts, params: SamplingParams) -> int:
    failed = 0
    for output in _in_order(llm.stream(prompts, params, on_error="record")):
        failed += output.error is not None
        line = prompts.lines.popleft()
        where = f"line {line}: " if line is not None else ""
        shown = output.prompt if output.prompt is not None else output.prompt_token_ids
        print(f"[{output.index}] {shown!r}")
        for completion in output.outputs:
            error = completion.error
            text = repr(completion.text) if error is None else f"error: {where}{error}"
            print(f"    {text}", flush=True)
    return _report(failed)


def _write_records(llm: LLM, prompts: Prompts, params: SamplingParams, sink: TextIO) -> int:
    if stat.S_ISREG(_stat(sink).st_mode):
        sink.truncate(0)
    failed = count = 0
    for output in _in_order(llm.stream(prompts, params, on_error="record")):
        failed, count = failed + (output.error is not None), count + 1
        record = {
            "index": output.index,
            "line": prompts.lines.popleft(),
            "prompt": output.prompt,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "outputs": [
                {
                    "text": completion.text,
                    "num_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "error": completion.error,
                }
                for completion in output.outputs
            ],
            "metrics": asdict(output.metrics),
        }
        try:
            sink.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--output {sink.name!r} can't be written: {error.strerror}; it holds"
                f" {count - 1} whole records"
            ) from error
    print(f"{count} records written to {sink.name}", file=sys.stderr)
    return _report(failed)


def _report(failed: int) -> int:
    if failed:
        print(f"{failed} prompts failed; their records say why", file=sys.stderr)
    return 1 if failed else 0
