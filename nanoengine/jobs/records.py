"""Converts outputs and errors to records: one line of JSON each, with the row and its error.

    OpenAI   {"id": "batch_req_ROW", "custom_id": ..., "response": {...}, "error": null}
    simple   {"_row": ROW, the row's columns, "outputs": [...], "usage": {...}, "error": null}

`record_log.py` reads a record's row and error back.
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

LEAST_LOGPROB = -9999.0
"""Replaces -inf, which JSON lacks; OpenAI uses the same number."""


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
            return self._failure(task, result)
        return self._answer(task, result)

    def _answer(self, task: Task, output: RequestOutput) -> bytes:
        """The record of an answered row; `task.outputs` are the outputs of its earlier turns."""
        outputs = [*task.outputs, output]
        if task.form is not None:
            keys = (f"{task.key}/{turn}" for turn in range(len(outputs)))
            outputs = list(map(task.form.parse, outputs, keys))
            output = outputs[-1]
        if task.answer is not None:
            own = {"id": f"{task.kind}-{task.row}", "created": self._created, "model": self._model}
            body = own | task.answer(sorted(outputs, key=lambda one: one.index))
            return json_line(_openai_record(task, body, None))
        usage = _usage(outputs)
        if task.kind == "simple":
            texts = [
                _completion(one, completion, {"turn": turn} if task.outputs else {})
                for turn, one in enumerate(outputs)
                for completion in one.outputs
            ]
            return json_line(_simple_record(task, texts, usage, None))
        is_chat = task.kind == "chat"
        asked = (task.params.logprobs, task.form)
        choose = functools.partial(_chat_choice, *asked) if is_chat else _text_choice
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{task.row}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choose(completion) for completion in output.outputs],
            "usage": usage,
        }
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(output)
        return json_line(_openai_record(task, body, None))

    def _failure(self, task: Task, error: RowError) -> bytes:
        """The record of a failed row."""
        told = {"code": error.code, "message": str(error)}
        told |= {"line": task.number, "file": task.input.name}
        if task.kind != "simple":
            return json_line(_openai_record(task, None, told))
        try:
            return json_line(_simple_record(task, [], None, told))
        except RecursionError:  # Why: a value that can be parsed may be too deep to serialize.
            task.columns = {}
            return json_line(_simple_record(task, [], None, told))


def _simple_record(task: Task, outputs: object, usage: object, error: object) -> dict[str, Any]:
    """The record of a simple row; the job's fields replace columns with the same name."""
    columns = {name: value for name, value in task.columns.items() if name not in SIMPLE_FIELDS}
    return {"_row": task.row, **columns, "outputs": outputs, "usage": usage, "error": error}


def _openai_record(task: Task, body: object, error: object) -> dict[str, Any]:
    own = {"id": f"batch_req_{task.row}", "custom_id": task.custom_id}
    response = {"status_code": 200, "request_id": f"req_{task.row}", "body": body}
    return {**own, "response": None if body is None else response, "error": error}


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that Python's `splitlines` and other programs treat as line ends, unlike JSON."""


def json_line(record: dict[str, Any]) -> bytes:
    """A line of JSON; `backslashreplace` writes a lone surrogate as a JSON escape."""
    try:
        text = ENCODER.encode(record)
    except (ValueError, TypeError):  # Parquet values, or floats that are not finite
        text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, default=str)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return text.encode(errors="backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """The value with keys converted to strings; floats that JSON can't hold become null."""
    value = to_python(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _usage(outputs: list[RequestOutput]) -> dict[str, int]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**counts, "total_tokens": prompt + completion}


def _completion(
    output: RequestOutput, completion: CompletionOutput, record: dict[str, Any]
) -> dict[str, Any]:
    """Adds a completion of a simple row to `record`; without text, adds its token ids."""
    record["text"] = completion.text
    if not completion.text:
        record["token_ids"] = completion.token_ids
    record |= parts(completion) | _ending(completion)
    if completion.logprobs is not None:
        record["logprobs"] = [_by_token(entry) for entry in completion.logprobs]
    if output.prompt_logprobs is not None and completion.index == 0:
        record["prompt_logprobs"] = _prompt_logprobs(output)
    return record


def _ending(completion: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def parts(completion: CompletionOutput) -> dict[str, Any]:
    """The fields of a parsed answer other than its text."""
    names = ("reasoning_content", "tool_calls", "parse_error")
    return {name: part for name in names if (part := getattr(completion, name)) is not None}


def _chat_choice(
    num_top: int | None, form: OutputParser | None, completion: CompletionOutput
) -> dict[str, Any]:
    beside = parts(completion)
    content = completion.text or (None if beside else "")
    message = {"role": "assistant", "content": content, "refusal": None, **beside}
    logprobs = None
    if completion.logprobs is not None:
        content = [_position(entry, num_top) for entry in completion.logprobs]
        logprobs = {"content": content, "refusal": None}
    choice = {"index": completion.index, "message": message, "logprobs": logprobs}
    choice |= _ending(completion)
    # Why not for a named tool: OpenAI's API returns "stop" then.
    is_named = form is not None and form.choice == "named"
    if completion.tool_calls and completion.finish_reason == "stop" and not is_named:
        choice["finish_reason"] = "tool_calls"
    return choice


def _position(entry: dict[int, Logprob], num_top: int | None) -> dict[str, Any]:
    """The logprobs of one generated token, with the most likely candidates.

    Args:
        entry: the candidates; the sampled token comes first.
        num_top: number of candidates; -1: all.
    """
    ranked = sorted(entry.items(), key=lambda one: one[1].rank)
    top = ranked if num_top == -1 else ranked[: num_top or 0]
    sampled = _candidate(*next(iter(entry.items())))
    return {**sampled, "top_logprobs": [_candidate(*one) for one in top]}


def _candidate(token_id: int, one: Logprob) -> dict[str, Any]:
    text, logprob = _token(token_id, one)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _token(token_id: int, one: Logprob) -> tuple[str, float]:
    text = one.decoded_token if one.decoded_token is not None else f"token_id:{token_id}"
    return text, max(one.logprob, LEAST_LOGPROB)


def _text_choice(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        sampled = [_token(*next(iter(entry.items()))) for entry in completion.logprobs]
        tokens = [text for text, _ in sampled]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob in sampled],
            "top_logprobs": [_by_token(entry) for entry in completion.logprobs],
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
        }
    choice = {"index": completion.index, "text": completion.text, "logprobs": logprobs}
    return choice | _ending(completion)


def _by_token(entry: dict[int, Logprob]) -> dict[str, float]:
    return dict(_token(*one) for one in entry.items())


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, float] | None]:
    return [None if entry is None else _by_token(entry) for entry in output.prompt_logprobs or ()]
