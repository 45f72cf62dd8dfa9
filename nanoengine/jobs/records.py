"""Converts outputs and errors to records, each one line of JSON.

    OpenAI   {"id": "batch_req_ROW", "custom_id": ..., "response": {...}, "error": null}
    simple   {"_row": ROW, the row's columns, "outputs": [...], "usage": {...}, "error": null}

`record_log.py` reads the row and the error of a record back.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoengine.jobs.record_log import SIMPLE_FIELDS
from nanoengine.jobs.rows import Task
from nanoengine.jobs.source import RowError
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput
from nanoengine.settings.checks import to_python

if TYPE_CHECKING:
    from nanoengine.features.output_parser import OutputParser

PARSED_FIELDS = ("reasoning_content", "tool_calls", "parse_error")
MIN_LOGPROB = -9999.0
"""Replaces -inf, which JSON lacks; the same value as in OpenAI's API."""


class Recorder:
    """Makes records.

    Args:
        model: name of the model, for responses.
        created: time of the job [s since 1970]; a resumed job keeps it.
    """

    def __init__(self, model: str, created: int | None = None) -> None:
        self._model = model
        self._created = int(time.time()) if created is None else created

    def record(self, task: Task, result: RequestOutput | RowError) -> bytes:
        """The record of a row, from its last output or its error."""
        if isinstance(result, RowError):
            return self._failed_record(task, result)
        return self._answered_record(task, result)

    def _answered_record(self, task: Task, output: RequestOutput) -> bytes:
        """The record of an answered row; `task.outputs` are the outputs of its earlier turns."""
        outputs = [*task.outputs, output]
        parser = task.output_parser
        if parser is not None:
            keys = (f"{task.key}/{turn}" for turn in range(len(outputs)))
            outputs = list(map(parser.parse, outputs, keys))
            output = outputs[-1]
        if task.make_body is not None:
            body = {"id": f"{task.kind}-{task.row}", "created": self._created, "model": self._model}
            body |= task.make_body(sorted(outputs, key=lambda output: output.index))
            return json_line(_openai_record(task, body, None))
        usage = _usage(outputs)
        if task.kind == "simple":
            completions = [
                _completion(output, completion, {"turn": turn} if task.outputs else {})
                for turn, output in enumerate(outputs)
                for completion in output.outputs
            ]
            return json_line(_simple_record(task, completions, usage, None))
        is_chat, num_top = task.kind == "chat", task.params.logprobs
        choice = functools.partial(_chat_choice, num_top, parser)
        if not is_chat:
            choice = functools.partial(_text_choice, output, task.echo)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{task.row}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice(completion) for completion in output.outputs],
            "usage": usage,
        }
        if output.prompt_logprobs is not None and not (task.echo and num_top is not None):
            body["prompt_logprobs"] = _prompt_logprobs(output)
        return json_line(_openai_record(task, body, None))

    def _failed_record(self, task: Task, error: RowError) -> bytes:
        """The record of a failed row."""
        report = {"code": error.code, "message": str(error)}
        report |= {"line": task.number, "file": task.input.name}
        if task.kind != "simple":
            return json_line(_openai_record(task, None, report))
        return json_line(_simple_record(task, [], None, report))


def _simple_record(task: Task, outputs: object, usage: object, error: object) -> dict[str, Any]:
    """The record of a simple row; its four new fields replace columns with the same names."""
    columns = {name: value for name, value in task.columns.items() if name not in SIMPLE_FIELDS}
    return {"_row": task.row, **columns, "outputs": outputs, "usage": usage, "error": error}


def _openai_record(task: Task, body: object, error: object) -> dict[str, Any]:
    ids = {"id": f"batch_req_{task.row}", "custom_id": task.custom_id}
    response = {"status_code": 200, "request_id": f"req_{task.row}", "body": body}
    return {**ids, "response": None if body is None else response, "error": error}


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that Python's `splitlines` and other programs treat as line ends, unlike JSON."""


def json_line(record: dict[str, Any]) -> bytes:
    """A line of JSON; `backslashreplace` writes a lone surrogate as a JSON escape."""
    try:
        text = ENCODER.encode(record)
    except (ValueError, TypeError):  # Parquet values, or floats that are not finite
        text = json.dumps(_to_json(record), ensure_ascii=False, allow_nan=False, default=str)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return text.encode(errors="backslashreplace") + b"\n"


def _to_json(value: Any) -> Any:
    """The value with keys converted to strings; floats that JSON can't hold become null."""
    value = to_python(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _usage(outputs: list[RequestOutput]) -> dict[str, int]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**counts, "total_tokens": prompt + completion}


def _completion(
    output: RequestOutput, completion: CompletionOutput, record: dict[str, Any]
) -> dict[str, Any]:
    """Adds a completion of a simple row to `record`, with token ids if it has no text."""
    record["text"] = completion.text
    if not completion.text:
        record["token_ids"] = completion.token_ids
    record |= parsed_fields(completion) | _ending(completion)
    if completion.logprobs is not None:
        record["logprobs"] = [_by_token(entry) for entry in completion.logprobs]
    if output.prompt_logprobs is not None and completion.index == 0:
        record["prompt_logprobs"] = _prompt_logprobs(output)
    return record


def _ending(completion: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def parsed_fields(completion: CompletionOutput) -> dict[str, Any]:
    """The fields of a parsed answer other than its text."""
    return {name: part for name in PARSED_FIELDS if (part := getattr(completion, name)) is not None}


def _chat_choice(
    num_top: int | None, parser: OutputParser | None, completion: CompletionOutput
) -> dict[str, Any]:
    parsed = parsed_fields(completion)
    content = completion.text or (None if parsed else "")
    message = {"role": "assistant", "content": content, "refusal": None, **parsed}
    logprobs = None
    if completion.logprobs is not None:
        content = [_token_logprobs(entry, num_top) for entry in completion.logprobs]
        logprobs = {"content": content, "refusal": None}
    choice = {"index": completion.index, "message": message, "logprobs": logprobs}
    choice |= _ending(completion)
    # Why not for a named tool: OpenAI's API returns "stop" then.
    is_named = parser is not None and parser.choice == "named"
    if completion.tool_calls and completion.finish_reason == "stop" and not is_named:
        choice["finish_reason"] = "tool_calls"
    return choice


def _token_logprobs(entry: dict[int, Logprob], num_top: int | None) -> dict[str, Any]:
    """The logprobs of one generated token, with the most likely candidates.

    Args:
        entry: the candidates; the sampled token comes first.
        num_top: number of candidates; -1: all.
    """
    ranked = sorted(entry.items(), key=lambda candidate: candidate[1].rank)
    top = ranked if num_top == -1 else ranked[: num_top or 0]
    sampled = _candidate(*next(iter(entry.items())))
    return {**sampled, "top_logprobs": [_candidate(*candidate) for candidate in top]}


def _candidate(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text, value = _text_and_value(token_id, logprob)
    return {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace"))}


def _text_and_value(token_id: int, logprob: Logprob) -> tuple[str, float]:
    text = logprob.decoded_token
    return f"token_id:{token_id}" if text is None else text, max(logprob.logprob, MIN_LOGPROB)


def _text_choice(output: RequestOutput, echo: str, completion: CompletionOutput) -> dict[str, Any]:
    """A completion, with its prompt if `echo` is set (see `Task`). The prompt's first token has no
    log-probability."""
    text, entries, logprobs = completion.text, completion.logprobs, None
    prompt, before = output.prompt or "", output.prompt_logprobs or []
    if echo == "alone":
        text, entries = "", None if entries is None else []
    if echo:
        text, entries = prompt + text, None if entries is None else [*before, *entries]
    if entries is not None:
        sampled = [_text_and_value(*next(iter(e.items()))) if e else ("", None) for e in entries]
        tokens = [token for token, _ in sampled]
        if echo:
            tokens[0] = prompt[: len(prompt) - sum(map(len, tokens[1 : len(before)]))]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [value for _, value in sampled],
            "top_logprobs": [e and _by_token(e) for e in entries],
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
        }
    choice = {"index": completion.index, "text": text, "logprobs": logprobs}
    return choice | _ending(completion)


def _by_token(entry: dict[int, Logprob]) -> dict[str, float]:
    return dict(_text_and_value(*candidate) for candidate in entry.items())


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, float] | None]:
    return [None if entry is None else _by_token(entry) for entry in output.prompt_logprobs or ()]
