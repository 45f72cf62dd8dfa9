"""Converts a line to a task: prompt, sampling parameters, and the columns that its record repeats.

    OpenAI     {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    simple     {"prompt" | "prompt_token_ids" | "messages" | "turns": ..., any field of
               SamplingParams, other columns}; a string; a list of token ids; a line of text
    columns    any dict, with a prompt column or a template over the columns

A field that is not supported raises an error with its name. The supported fields and values are
defined in `SamplingParams`, `vllm_names`, and the tables in this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nanoengine.errors import ConfigError, RequestError
from nanoengine.jobs.prefetch import size_of
from nanoengine.jobs.source import STDIN, UTF8_HINT, Input, Line, RowError, line_id, read_lines
from nanoengine.settings.checks import nearest, quoted, to_python
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import NAMES, SAMPLING_PARAMS, translate
from nanoengine.text.chats import user_marker
from nanoengine.text.prompt_forms import CONTENT_KEYS, TEMPLATE_KEYS
from nanoengine.text.rendering import Renderer

if TYPE_CHECKING:
    from nanoengine.features.output_parser import OutputParser
    from nanoengine.features.pooling import PoolingTasks
    from nanoengine.settings.config import EngineConfig
    from nanoengine.text.tokenizer import Tokenizer

Kind = Literal["chat", "completion", "simple", "pooled"]

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, Kind] = {CHAT_URL: "chat", COMPLETION_URL: "completion"}

SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))

OPENAI = NAMES["OpenAI bodies"]
"""Fields of OpenAI bodies and of vLLM's server that have another name or meaning here."""

NO_TOOL_PARSER = (
    "rows have tools, but no parser is known for this chat template: tool calls stay text, unless"
    " --tool-call-parser is given"
)

ALREADY_RENDERED = "prompts with the chat template's {} are sent as with --raw, without --system"
ALL_ARE_DATA = "columns {} set no option: with --prompt-column or --template all columns are data"
OTHERS_ARE_DATA = "with --prompt-column other columns are data"

NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields of a body that are accepted and have no effect."""

_PARAMS = dict.fromkeys((*SAMPLING, *SAMPLING_PARAMS, *OPENAI))
_COMMON = (*SAMPLING, *OPENAI, *NO_EFFECT, *SAMPLING_PARAMS)
_CHAT = (
    "model", "messages", *TEMPLATE_KEYS, "cache_salt", "reasoning_effort", "tool_choice",
    "top_logprobs",
)  # fmt: skip
BODY_FIELDS: dict[Kind, dict[str, None]] = {
    "chat": dict.fromkeys((*_CHAT, *_COMMON)),
    "completion": dict.fromkeys(("model", "prompt", "cache_salt", *_COMMON)),
}
"""Fields of a body, in the order in which error messages list them."""

MAX_TOKENS: dict[Kind, int | None] = {"chat": None, "completion": 16, "simple": 256}
"""Default of max_tokens, for chats and completions as in OpenAI's API; None: the whole context."""

PROMPT_KEYS = (*CONTENT_KEYS, *TEMPLATE_KEYS, "cache_salt")
SUGGESTED_NAMES = {
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "stop_sequences": "stop",
    "top_logprobs": "logprobs", "reasoning_effort": "chat_template_kwargs", "tool_choice": "a body",
}  # fmt: skip
"""Options of other programs or of bodies -> the name that an error suggests for a simple row."""

MIN_SIMILARITY = 0.9
"""A column this similar to an option is refused as a typo; n_tokens (0.89) is accepted as data."""

MIN_NAME_LETTERS = 4
MAX_CACHED_PARAMS = 1024
MAX_CACHE_KEY_CHARS = 1 << 15
"""Parameters with a longer cache key are not cached, since rows may have any size."""

SNIFFED_ROWS = 1000
"""Maximum number of rows that are read until one can be parsed."""

MAX_DEPTH = 100
DEFAULT = SamplingParams()

TEMPLATES = Renderer("row")


@dataclass(slots=True, kw_only=True)
class Task:
    """One row that is being processed.

    Attributes:
        row, input, number: see `Line`.
        custom_id: the id of an OpenAI row.
        columns: the columns that a simple record repeats.
        prompt: a prompt for `LLM.stream`.
        key: seeds the row's random numbers.
        size: approximate size of the row's content [bytes].
        turns: the user's further messages; each is sent after the answer to the one before.
        outputs: outputs of earlier turns, or of finished parts.
        output_parser: parses reasoning and tool calls; None: outputs are not parsed.
        parts: the prompts of a row that has several; they run concurrently.
        make_body: makes the body of the response from the outputs, in the order of the parts.
        echo: a completion repeats the prompt: "before" its text, or "alone", without its text.
        error: why the row failed.
    """

    row: int
    input: Input
    number: int
    kind: Kind = "simple"
    custom_id: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None
    params: SamplingParams = DEFAULT
    key: str = ""
    size: int = 0
    turns: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    output_parser: OutputParser | None = None
    parts: list[Any] = field(default_factory=list)
    make_body: Callable[[list[Any]], dict[str, Any]] | None = None
    echo: Literal["", "before", "alone"] = ""
    error: RowError | None = None


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows are read; the same for all rows of a job, and part of its manifest.

    Attributes:
        sampling: Fields of `SamplingParams` for rows that don't set them.
        prompt_column: Column that is the prompt; other columns are data and are copied to the
            record.
        template: Jinja template over the columns that makes the prompt.
        chat: Send a prompt as a user message, with the model's chat template. In commands it is
            set unless --raw is given or the model has no template.
        system: System message before each prompt that is sent as a user message.
        ignore_unknown: Drop unknown fields of OpenAI bodies instead of failing the row.
        trust_row_templates: Run chat templates from rows. They are programs, which run in a
            sandbox with limits on time and memory.
        reasoning_parser: Parse the model's reasoning: qwen3, deepseek_r1, mistral, granite,
            openai_gptoss, or auto, which selects by chat template.
        tool_call_parser: Parse tool calls: hermes, qwen3_coder, llama3_json, mistral, openai, or
            auto, the default for OpenAI chats with tools, which selects by chat template.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str | None = None
    template: str | None = None
    chat: bool = False
    system: str | None = None
    ignore_unknown: bool = False
    trust_row_templates: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        for option in ("reasoning_parser", "tool_call_parser"):
            name = getattr(self, option)
            if name not in (None, "auto"):
                from nanoengine.features.output_parser import parser_name

                parser_name(option, name, str)
        if self.prompt_column is not None and self.template is not None:
            raise ConfigError("--prompt-column and --template both make the prompt: give only one")
        if self.system is not None and not self.chat:
            raise ConfigError("--system needs a chat template: give --chat-template, and no --raw")

    @property
    def parses_output(self) -> bool:
        """Whether outputs are parsed into reasoning, text and tool calls."""
        return self.reasoning_parser is not None or self.tool_call_parser is not None

    @property
    def columns_are_data(self) -> bool:
        """Whether a row's columns are only data, never sampling parameters."""
        return self.prompt_column is not None or self.template is not None


def reader_args(
    model: str, config: EngineConfig, info: Any, tokenizer: Callable[[], Tokenizer]
) -> tuple[Any, ...]:
    """The arguments of a `RowReader` after its options, for a model.

    Args:
        info: an object with the model's `max_model_len` and `generation_defaults`.
        tokenizer: returns the model's tokenizer; called when the first row needs it.
    """

    @functools.cache
    def pools() -> PoolingTasks:
        from nanoengine.features.pooling import PoolingTasks

        return PoolingTasks(config, info.max_model_len, tokenizer)

    def template() -> Any:
        return None if config.skip_tokenizer_init else tokenizer().chat_template

    def first_chat() -> str:
        print("prompts are sent as chat messages; --raw sends them as they are", file=sys.stderr)
        return user_marker(tokenizer())

    return model, info.generation_defaults, template, pools, first_chat


class RowReader:
    """Makes tasks from lines.

    Args:
        model: name of the loaded model.
        defaults: the model's default sampling parameters.
        chat_template: returns the model's chat template, which determines the output parsers.
        pools: makes the reader of pooling requests; None: embeddings and scores are not supported.
        first_chat: called before the first prompt becomes a chat message; returns the marker of
            prompts that are already rendered, see `user_marker`.

    Raises:
        ConfigError: the template is invalid.
        RequestError: a sampling option is out of range.
    """

    def __init__(
        self,
        options: RowOptions,
        model: str = "",
        defaults: Mapping[str, Any] | None = None,
        chat_template: Callable[[], Any] = str,
        pools: Callable[[], PoolingTasks] | None = None,
        first_chat: Callable[[], str] = str,
    ) -> None:
        self._options, self._pools = options, pools
        self._chat_template = functools.cache(chat_template)
        self._marker = functools.cache(first_chat)
        self._model = model
        self._base = {**(defaults or {}), **options.sampling}
        self._params: dict[str, SamplingParams] = {}
        self._warned: set[str] = set()
        self._columns = [] if options.template is None else _template_columns(options.template)
        self._make_params({}, "simple")  # Why: it raises if a sampling option is out of range.

    def task(self, line: Line, kind: Kind = "simple") -> Task:
        """Makes the task of a line; if the row can't run, the task has an error.

        Args:
            kind: the format of the input; "chat" means any kind of OpenAI row.
        """
        task = Task(row=line.row, input=line.input, number=line.number, kind=kind)
        task.key, task.size = str(line.row), size_of(line.content)
        try:
            self._fill(task, parse_line(line))
        except RequestError as error:
            has_code = isinstance(error, RowError)
            task.error = error if has_code else RowError("invalid_row", str(error))
        except Exception as error:  # Why all: the content of a row is arbitrary.
            task.error = RowError("invalid_row", f"{type(error).__name__}: {error}")
        if task.error and task.error.code == "unreadable_row" and (known := line_id(line.content)):
            task.columns = dict([known])
            task.custom_id = task.columns.get("custom_id")
        return task

    def _fill(self, task: Task, row: Any) -> None:
        if not isinstance(row, dict):
            if self._options.columns_are_data or task.kind != "simple":
                raise RequestError(f"the row must be an object, got {quoted(row)}")
            row = {"prompt_token_ids" if isinstance(row, list) else "prompt": row}
        if task.kind != "simple":
            self._fill_openai(task, row)
            return
        task.columns = row
        _, task.key = line_id(row) or ("", task.key)
        if self._options.columns_are_data:
            if names := [name for name in SAMPLING if name in row]:
                self._warn("columns", ALL_ARE_DATA.format(", ".join(names)))
            task.prompt = self._apply_chat({"prompt": self._from_columns(row)})
            task.params = self._params_for(self._with_parser(task, {}), "simple")
        else:
            self._fill_simple(task, row)

    def lacks_prompt(self, row: Mapping[str, Any]) -> bool:
        """Whether a row lacks the columns that its prompt is made from."""
        if not self._options.columns_are_data:
            return row.keys().isdisjoint((*CONTENT_KEYS, "turns"))
        with contextlib.suppress(RequestError):
            self._from_columns(row)
            return False
        return not row.keys() >= {self._options.prompt_column, *self._columns} - {None}

    # --- simple rows ----------------------------------------------------------------------------

    def _from_columns(self, row: Mapping[str, Any]) -> str:
        template = self._options.template
        if template is not None:
            columns = {name: row[name] for name in self._columns if name in row}
            try:
                return TEMPLATES.render(template, columns)
            except Exception as error:  # Why all: templates are programs, and raise anything.
                raise RequestError(f"--template failed on the row: {error}") from error
        name = self._options.prompt_column or ""
        if name not in row:
            raise RequestError(f"the row has no column {name!r}; {nearest(name, list(row))}")
        if not isinstance(row[name], str):
            raise RequestError(f"column {name!r} must be a string, got {quoted(row[name])}")
        return str(row[name])

    def _apply_chat(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """A prompt, with its text replaced by messages if prompts are sent as chat messages."""
        text, has_text = prompt.get("prompt"), prompt.keys() & CONTENT_KEYS == {"prompt"}
        # Why not others: `LLM.stream` raises an error.
        if not self._options.chat or not has_text or not text or not isinstance(text, str):
            return prompt
        if (marker := self._marker()) and marker in text:
            self._warn("rendered", ALREADY_RENDERED.format(marker))
            return prompt
        return prompt | self._first_messages(prompt.pop("prompt"))

    def _first_messages(self, text: str) -> dict[str, Any]:
        """The first messages of a conversation: the system message, then the user's."""
        messages = (("system", self._options.system), ("user", text))
        return {"messages": [{"role": role, "content": c} for role, c in messages if c is not None]}

    def _fill_simple(self, task: Task, row: Mapping[str, Any]) -> None:
        prompt = _present_fields(row, PROMPT_KEYS)
        self._check_template(prompt)
        for name, value in row.items():
            hint = _misnamed_option_hint(name) if value is not None else ""
            if hint and to_python(value) not in _no_effect_values(name):
                raise RequestError(f"column {name!r} has no effect: {hint}; {OTHERS_ARE_DATA}")
        if isinstance(row.get("model"), str):
            self._check_model(row["model"])
        params = self._with_parser(task, _present_fields(row, _PARAMS), prompt.get("tools"))
        task.params = self._params_for(params, "simple")
        turns = to_python(row.get("turns"))
        if turns is None:
            task.prompt = self._apply_chat(prompt)
            return
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise RequestError(f"'turns' must be a list of strings, got {quoted(turns)}")
        if task.params.n != 1:
            raise RequestError(f"n must be 1 in a row with 'turns', got {task.params.n}")
        if not prompt.keys().isdisjoint(CONTENT_KEYS):
            raise RequestError("the row has 'turns' and another prompt: give only one")
        task.turns = turns[1:]
        task.prompt = {**prompt, **self._first_messages(turns[0])}

    # --- OpenAI rows ----------------------------------------------------------------------------

    def _fill_openai(self, task: Task, row: Mapping[str, Any]) -> None:
        known = KINDS.get(row["url"]) if isinstance(row.get("url"), str) else None
        task.kind = known or "chat"
        task.custom_id = row.get("custom_id")
        if not isinstance(task.custom_id, str):
            raise RequestError(f"custom_id must be a string, got {quoted(task.custom_id)}")
        task.key = task.custom_id
        pooling, names = "", BODY_FIELDS.get(task.kind, {})
        if known is None:
            from nanoengine.jobs import pooled

            pooling = pooled.KINDS.get(str(row.get("url")), "")
            if not pooling or self._pools is None:
                urls = ", ".join([*KINDS, *(pooled.KINDS if self._pools else ())])
                url = quoted(row.get("url"))
                raise RowError("unknown_url", f"url must be one of {urls}, got {url}")
            task.kind = "pooled"
            names = dict.fromkeys((*pooled.BODY_FIELDS[pooling], *NO_EFFECT))
        if row.get("method", "POST") != "POST":
            raise RequestError(f"method must be 'POST', got {quoted(row['method'])}")
        if not isinstance(row.get("body"), dict):
            raise RequestError(f"body must be an object, got {quoted(row.get('body'))}")
        body = {name: field for name, field in row["body"].items() if field is not None}
        self._check_names(body, names)
        for name in row.keys() - {"custom_id", "method", "url", "body"}:
            if name in names and name not in NO_EFFECT and not self._options.ignore_unknown:
                raise RequestError(f"{name!r} has no effect outside of body: move it into body")
            self._warn("outside", f"fields outside of body are dropped: {name!r}")
        self._check_model(body.get("model"))
        if pooling:
            assert self._pools is not None
            task.parts, task.params, task.make_body = pooled.read(pooling, body, self._pools())
            task.prompt = task.parts[0]
        elif known == "chat":
            self._fill_chat(task, body)
        else:
            task.prompt = _completion_prompt(body)
            if "echo" in body:
                _add_echo(task, body)
            task.params = self._params_for(body, "completion")

    def _check_names(self, body: dict[str, Any], names: dict[str, None]) -> None:
        for name in body.keys() - names.keys():
            if not self._options.ignore_unknown:
                raise RequestError(f"unknown field {name!r} in body; {nearest(name, names)}")
            del body[name]

    def _check_model(self, model: object) -> None:
        """Warns once per name if a row names another model; the loaded model is used."""
        if not isinstance(model, str | None):
            raise RequestError(f"model must be a string, got {quoted(model)}")
        if model not in (None, self._model):
            runs = f"rows name model {quoted(model)}, but {self._model!r} runs them"
            self._warn(f"model {model}", runs)

    def _warn(self, key: str, message: str) -> None:
        """Warns once per key."""
        if key not in self._warned and len(self._warned) < MAX_CACHED_PARAMS:
            self._warned.add(key)
            warnings.warn(message, stacklevel=1)

    def _check_template(self, prompt: Mapping[str, Any]) -> None:
        if "chat_template" in prompt and not self._options.trust_row_templates:
            needed = "trust_row_templates (--trust-row-templates)"
            raise RequestError(f"chat_template is a program, which is refused without {needed}")

    def _fill_chat(self, task: Task, body: dict[str, Any]) -> None:
        if "messages" not in body:
            raise RequestError("body has no messages")
        prompt = _present_fields(body, ("messages", *TEMPLATE_KEYS, "cache_salt"))
        self._check_template(prompt)
        tools = prompt.get("tools")
        if body.get("tool_choice") == "none":
            prompt.pop("tools", None)
        if "reasoning_effort" in body:
            variables = prompt.get("chat_template_kwargs", {})
            if isinstance(variables, dict):  # otherwise `LLM.stream` raises
                effort = {"reasoning_effort": body["reasoning_effort"]}
                prompt["chat_template_kwargs"] = {**effort, **variables}
        task.prompt = prompt
        flag, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
        if not isinstance(flag, bool):
            raise RequestError(f"logprobs must be true or false in a chat, got {quoted(flag)}")
        if top is not None and not flag:
            raise RequestError("top_logprobs needs logprobs: true")
        if flag:
            body["logprobs"] = 0 if top is None else top
        choice = body.pop("tool_choice", None)
        task.params = self._params_for(self._with_parser(task, body, tools, choice), "chat")

    # --- reasoning and tool calls ---------------------------------------------------------------

    def _with_parser(
        self, task: Task, params: dict[str, Any], tools: Any = None, choice: Any = None
    ) -> dict[str, Any]:
        """Sets the output parser of a task; returns the row's and the parser's parameters."""
        options, is_chat = self._options, task.kind == "chat"
        if not options.parses_output and not (is_chat and (tools or choice)):
            return params
        from nanoengine.features.output_parser import TWO_CONSTRAINTS, make_parser, parser_name

        reader = options.tool_call_parser
        if reader is None and is_chat and tools and choice in (None, "auto"):
            try:
                reader = parser_name("tool_call_parser", "auto", self._chat_template)
            except RequestError:
                warnings.warn(NO_TOOL_PARSER, stacklevel=1)
        tools = tools if isinstance(tools, list) else None  # otherwise `LLM.stream` raises
        parsers = (options.reasoning_parser, reader, tools, choice)
        task.output_parser = parser = make_parser(*parsers, self._chat_template)
        if parser is None:
            return params
        if parser.is_constrained:
            is_text = params.pop("response_format", None) in (None, {"type": "text"})
            if not is_text or "structured_outputs" in params:
                raise RequestError(TWO_CONSTRAINTS)
        return parser.required_fields() | params  # Why last: the row's own values take precedence.

    # --- sampling parameters --------------------------------------------------------------------

    def _params_for(self, fields: Mapping[str, Any], kind: Kind) -> SamplingParams:
        """The job's parameters updated by the row's; equal parameters share an object."""
        own = {name: value for name, value in fields.items() if name in _PARAMS}
        key = f"{kind}{own!r}"
        params = self._params.get(key)
        if params is None:
            params = self._make_params(own, kind)
            if len(self._params) >= MAX_CACHED_PARAMS:
                self._params.clear()
            if len(key) <= MAX_CACHE_KEY_CHARS:
                self._params[key] = params
        return params

    def _make_params(self, own: dict[str, Any], kind: Kind) -> SamplingParams:
        if own.get("response_format") is not None:
            own["response_format"] = _structured_outputs(own["response_format"])
        own = translate(own, OPENAI, RequestError)
        biases = own.get("logit_bias")
        if isinstance(biases, dict):
            # Why: keys of JSON objects are strings.
            ids = (int(k) if isinstance(k, str) and k.isdecimal() else k for k in biases)
            own["logit_bias"] = dict(zip(ids, biases.values(), strict=True))
        return SamplingParams(**{"max_tokens": MAX_TOKENS[kind], **self._base, **own})


def _present_fields(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of a row with these names; null counts as missing."""
    return {name: to_python(row[name]) for name in names if row.get(name) is not None}


@functools.lru_cache(MAX_CACHED_PARAMS)
def _misnamed_option_hint(column: str) -> str:
    """A hint for a column that looks like an option but isn't one here; empty if it is data."""
    refused = OPENAI.get(column, {}).get("refused")
    if refused is not None or column in SUGGESTED_NAMES:
        return refused or f"give {SUGGESTED_NAMES[column]}"
    letters = _letters_of(column)
    near = difflib.get_close_matches(letters, OPTIONS, n=1, cutoff=MIN_SIMILARITY)
    is_data = not near or len(letters) < MIN_NAME_LETTERS or column in (*PROMPT_KEYS, *_PARAMS)
    return "" if is_data else f"did you mean {OPTIONS[near[0]]!r}?"


def _no_effect_values(column: str) -> tuple[Any, ...]:
    """Values with which a refused column is accepted, because they have no effect."""
    entry = OPENAI.get(column, {"unless": ()})
    return tuple(entry.get("unless", (None, False)))


def _letters_of(name: object) -> str:
    return re.sub("[^a-z]", "", str(name).lower())


OPTIONS = {
    _letters_of(name): name
    for name in (*TEMPLATE_KEYS, "cache_salt", *_PARAMS)
    if "refused" not in OPENAI.get(name, {}) and name not in ("tools", "priority")
}
"""Options that a misspelt column may mean; the excluded ones are too similar to names of data."""


def _structured_outputs(response_format: object) -> dict[str, Any] | None:
    """OpenAI's response_format as fields of `StructuredOutputs`."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
    raise RequestError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type':"
        " 'json_schema', 'json_schema': {'schema': {...}}}, got " + quoted(response_format)
    )


def _completion_prompt(body: Mapping[str, Any]) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise RequestError(f"prompt must be one prompt, got {len(prompt)}: give each its own row")
    if not isinstance(prompt, str | list):
        raise RequestError(f"prompt must be a string or token ids, got {quoted(prompt)}")
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt} | ({"cache_salt": body["cache_salt"]} if "cache_salt" in body else {})


def _add_echo(task: Task, body: dict[str, Any]) -> None:
    """Sets `echo` of a completion. With max_tokens=0 one token is computed, and left out."""
    echo = body.pop("echo")
    if not isinstance(echo, bool) or (echo and "prompt" not in task.prompt):
        raise RequestError("echo must be true or false, and needs a prompt that is text")
    if not echo:
        return
    task.echo = "before"
    if body.get("max_tokens") == 0:
        task.echo, body["max_tokens"] = "alone", 1
    if "logprobs" in body:
        body["prompt_logprobs"] = body["logprobs"]


def kind_of(lines: Iterable[Line]) -> Kind:
    """The kind of an input's rows, from its first row that can be parsed."""
    row = next(_parsed_rows(lines), "")
    if not isinstance(row, dict) or any(row.get(n) is not None for n in (*CONTENT_KEYS, "turns")):
        return "simple"
    return "chat" if "body" in row or "custom_id" in row else "simple"


def _parsed_rows(lines: Iterable[Line]) -> Iterator[Any]:
    """The rows that can be parsed among the first lines of an input."""
    for line in itertools.islice(lines, SNIFFED_ROWS):
        with contextlib.suppress(RowError):
            yield parse_line(line)


def require_columns(inputs: Iterable[Input], options: RowOptions, max_row_bytes: int) -> None:
    """Checks that each file has a row with the columns that prompts are made from.

    Raises:
        ConfigError: none of the first rows has them, or the header of a CSV can't be read.
    """
    reader = RowReader(options)
    for source in inputs:
        has_columns = options.columns_are_data or source.form in ("csv", "parquet")
        if source.name == STDIN or not has_columns:
            continue
        lines, names = read_lines([source], max_row_bytes), dict[str, None]()
        first = next(lines, None)
        error = first.content if first and isinstance(first.content, RowError) else None
        if error and source.form == "csv" and error.code == "unreadable_input":
            raise ConfigError(f"input {source.name!r}: {error}")
        for row in _parsed_rows(itertools.chain([first] if first else [], lines)):
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
                if not reader.lacks_prompt(row):
                    break
        else:
            if names or source.form == "txt":
                required = options.prompt_column or options.template or "prompt"
                missing = f"no row of {source.name!r} has the columns for {required!r}"
                hint = "select one with --prompt-column, or several with --template"
                raise ConfigError(f"{missing}: its columns are {quoted(list(names))}; {hint}")


def parse_line(line: Line) -> Any:
    """The content of a line: a JSON value, text, or columns.

    Raises:
        RowError: it can't be parsed.
    """
    content = line.content
    if isinstance(content, RowError):
        raise content
    if not isinstance(content, bytes):
        return content
    try:
        text = content.decode().rstrip("\r\n")
        if line.input.form == "txt":
            return text
        value = JSON_DECODER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        return value
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError("unreadable_row", f"the line is not UTF-8: {error}; {UTF8_HINT}") from error
    except (ValueError, RecursionError) as error:
        reason = re.sub(r": line \d+ column (\d+) \(char \d+\)$", r" at column \1", str(error))
        raise RowError("unreadable_row", f"the line is not JSON: {reason}") from error


def _check_depth(value: Any) -> None:
    """Raises RecursionError if the value is nested too deeply to be serialized again."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [child for nodes in inner for child in nodes if isinstance(child, dict | list)]
        if not level:
            return
    raise RecursionError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _parse_float(text: str) -> float:
    if math.isinf(number := float(text)):
        message = f"{text:.40} is too large for a 64-bit float: write it as a string"
        raise RowError("unreadable_row", message)
    return number


JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_float)


def _template_columns(template: str) -> list[str]:
    """The columns that a template uses.

    Raises:
        ConfigError: it is not valid Jinja.
    """
    try:
        return TEMPLATES.render(template, None).split()
    except (ValueError, TimeoutError, MemoryError) as error:
        raise ConfigError(f"--template is not valid Jinja: {error}") from error
