"""Converts a line to a task: prompt, sampling parameters, and what the record repeats of the row.

    OpenAI     {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    simple     {"prompt" | "prompt_token_ids" | "messages" | "turns": ..., any field of
               SamplingParams, other columns}; a string; a list of token ids; a line of text
    columns    any dict, with a prompt column or a template over the columns

A field is either supported or refused with an error that names it. The valid values are defined in
one place each: `SamplingParams`, `vllm_names`, and the tables in this module.
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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nanoengine.errors import ConfigError, RequestError
from nanoengine.jobs.prefetch import size_of
from nanoengine.jobs.source import AS_UTF8, STDIN, Input, Line, RowError, own_id, read_lines
from nanoengine.settings.checks import nearest, repr_short, to_python
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import NAMES, SAMPLING_PARAMS, translate
from nanoengine.text.prompt_forms import CONTENT_KEYS, TEMPLATE_KEYS
from nanoengine.text.rendering import Renderer

if TYPE_CHECKING:
    from nanoengine.features.output_parser import OutputParser
    from nanoengine.features.pooling import Pooler
    from nanoengine.settings.config import EngineConfig
    from nanoengine.text.tokenizer import Tokenizer

Kind = Literal["chat", "completion", "simple", "pooled"]

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, Kind] = {CHAT_URL: "chat", COMPLETION_URL: "completion"}

SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))

OPENAI = NAMES["OpenAI bodies"]
"""Fields of OpenAI bodies and of vLLM's server that do not map directly to a field here."""

NO_FORM = (
    "rows have tools, and the chat template shows no form of calls that is known: answers stay"
    " text, unless --tool-call-parser names one"
)

RAW_PROMPTS = (
    "the model has a chat template, and prompts are given to it without: --chat applies it"
)
ALL_ARE_DATA = "columns {} set no option: with --prompt-column or --template all columns are data"
OTHERS_ARE_DATA = "with --prompt-column other columns are data"
CHAT_MARK = re.compile(r"<[^<>\s{}]+>|\[INST\]")

NOTES = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields of a body that are accepted and have no effect."""

_PARAMS = dict.fromkeys((*SAMPLING, *SAMPLING_PARAMS, *OPENAI))
_COMMON = (*SAMPLING, *OPENAI, *NOTES, *SAMPLING_PARAMS)
_CHAT = (
    "model", "messages", *TEMPLATE_KEYS, "cache_salt", "reasoning_effort", "tool_choice",
    "top_logprobs",
)  # fmt: skip
BODY: dict[Kind, dict[str, None]] = {
    "chat": dict.fromkeys((*_CHAT, *_COMMON)),
    "completion": dict.fromkeys(("model", "prompt", "cache_salt", *_COMMON)),
}
"""Fields of a body, in the order in which error messages list them."""

MAX_TOKENS: dict[Kind, int | None] = {"chat": None, "completion": 16, "simple": 256}
"""Default max_tokens, for chats and completions as in OpenAI's API; None: all of the context."""

PROMPT_KEYS = (*CONTENT_KEYS, *TEMPLATE_KEYS, "cache_salt")
ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "stop_sequences": "stop",
    "top_logprobs": "logprobs", "reasoning_effort": "chat_template_kwargs", "tool_choice": "a body",
}  # fmt: skip
"""Names used by other programs or in bodies -> the name to use in a simple row."""

LEAST_LIKENESS = 0.9
"""Similarity to an option from which a column is reported as misspelt; n_tokens has 0.89."""

LEAST_NAME = 4
KNOWN_PARAMS = 1024
KNOWN_CHARS = 1 << 15
"""Longest cache key of parameters; longer ones are not cached, since rows may have any size."""

SNIFFED_ROWS = 1000
"""How many rows are tried to find one that can be parsed."""

MOST_DEPTH = 100
DEFAULT = SamplingParams()

TEMPLATES = Renderer("row")


@dataclass(slots=True, kw_only=True)
class Task:
    """One row that is being processed.

    Attributes:
        row, input, number: see `Line`.
        custom_id: the id of an OpenAI row, as given.
        columns: the columns that a simple record repeats.
        prompt: a prompt as `LLM.stream` takes it.
        key: the key that seeds the row's random numbers.
        size: approximate size of the row's content [bytes].
        turns: the user's next messages, sent one by one after each answer.
        outputs: answers to earlier turns, or to some of the parts.
        form: how the answers are parsed; None: they are not parsed.
        parts: the prompts of a row that has several; they run concurrently.
        answer: makes the body of the response from the outputs, in the order of the parts.
        error: why the row can't run.
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
    form: OutputParser | None = None
    parts: list[Any] = field(default_factory=list)
    answer: Callable[[list[Any]], dict[str, Any]] | None = None
    error: RowError | None = None


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows are read; the same for all rows of a job, and part of its manifest.

    Attributes:
        sampling: Fields of `SamplingParams` for rows that don't set them.
        prompt_column: The column that is the prompt; other columns are data, and go into the
            record.
        template: Jinja template over the columns that makes the prompt.
        chat: Treat a prompt as a user's message, and apply the model's chat template.
        system: System message before each prompt; needs --chat.
        any_model: Don't warn about rows that ask for another model.
        ignore_unknown: Drop unknown fields of OpenAI bodies instead of refusing the row.
        trust_row_templates: Run chat templates that come with rows: they are programs, run in a
            sandbox with limits on time and memory.
        reasoning_parser: Parse the model's reasoning: qwen3, deepseek_r1, mistral, granite,
            openai_gptoss, or auto, by the chat template.
        tool_call_parser: Parse tool calls: hermes, qwen3_coder, llama3_json, mistral, openai, or
            auto, by the chat template, which is the default for OpenAI chats with tools.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str | None = None
    template: str | None = None
    chat: bool = False
    system: str | None = None
    any_model: bool = False
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
            raise ConfigError("--prompt-column and --template both make the prompt: give one")
        if self.system is not None and not self.chat:
            raise ConfigError("--system needs --chat: only a chat template has a place for it")

    @property
    def takes_apart(self) -> bool:
        """Whether each answer is parsed into reasoning, text and tool calls."""
        return self.reasoning_parser is not None or self.tool_call_parser is not None

    @property
    def columns_alone(self) -> bool:
        """Whether a row's columns are only data, never parameters."""
        return self.prompt_column is not None or self.template is not None


def read_by(
    model: str, config: EngineConfig, info: Any, tokenizer: Callable[[], Tokenizer]
) -> tuple[str, Mapping[str, Any], Callable[[], Any], Callable[[], Pooler]]:
    """The arguments of a `RowReader` after its options, for a model.

    Args:
        info: what the engine knows about the model, or a part of it.
        tokenizer: returns the model's tokenizer; called when the first row needs it.
    """

    @functools.cache
    def pools() -> Pooler:
        from nanoengine.features.pooling import Pooler

        return Pooler(config, info.max_model_len, tokenizer)

    def template() -> Any:
        return None if config.skip_tokenizer_init else tokenizer().chat_template

    return model, info.generation_defaults, template, pools


class RowReader:
    """Makes tasks from lines.

    Args:
        model: name of the loaded model.
        defaults: the model's own sampling parameters.
        chat_template: returns the model's chat template, which determines the output parsers.
        pools: makes the reader of pooling requests; None: rows can't ask for embeddings or scores.

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
        pools: Callable[[], Pooler] | None = None,
    ) -> None:
        self._options, self._pools = options, pools
        self._chat_template = functools.cache(chat_template)
        self._model = model
        self._base = {**(defaults or {}), **options.sampling}
        self._params: dict[str, SamplingParams] = {}
        self._warned: set[str] = set()
        self._names = _names_in(options.template) if options.template is not None else []
        self._make_params({}, "simple")

    def task(self, line: Line, kind: Kind = "simple") -> Task:
        """Makes the task of a line; a task that can't run holds its error.

        Args:
            kind: the form of the input; "chat" means either form of OpenAI rows.
        """
        task = Task(row=line.row, input=line.input, number=line.number, kind=kind)
        task.key, task.size = str(line.row), size_of(line.content)
        try:
            self._fill(task, value(line))
        except RequestError as error:
            is_told = isinstance(error, RowError)
            task.error = error if is_told else RowError("invalid_row", str(error))
        except Exception as error:  # Why all: the content of a row is arbitrary.
            task.error = RowError("invalid_row", f"{type(error).__name__}: {error}")
        return task

    def _fill(self, task: Task, row: Any) -> None:
        if not isinstance(row, dict):
            if self._options.columns_alone or task.kind != "simple":
                raise RequestError(f"the row must be an object, got {repr_short(row)}")
            row = {"prompt_token_ids" if isinstance(row, list) else "prompt": row}
        if task.kind != "simple":
            self._fill_openai(task, row)
            return
        task.columns = row
        _, task.key = own_id(row) or ("", task.key)
        if self._options.columns_alone:
            if named := [name for name in SAMPLING if name in row]:
                self._warn("columns", ALL_ARE_DATA.format(", ".join(named)))
            task.prompt = self._as_chat(self._from_columns(row))
            task.params = self._params_for(self._with_form(task, {}), "simple")
        else:
            self._fill_simple(task, row)

    def lacks_prompt(self, row: Mapping[str, Any]) -> bool:
        """Whether a row lacks the columns that its prompt is made from."""
        if not self._options.columns_alone:
            return row.keys().isdisjoint((*CONTENT_KEYS, "turns"))
        with contextlib.suppress(RequestError):
            self._from_columns(row)
            return False
        return not row.keys() >= {self._options.prompt_column, *self._names} - {None}

    # --- simple rows ----------------------------------------------------------------------------

    def _from_columns(self, row: Mapping[str, Any]) -> str:
        template = self._options.template
        if template is not None:
            columns = {name: row[name] for name in self._names if name in row}
            try:
                return TEMPLATES.render(template, columns)
            except Exception as error:  # Why all: templates are programs, and raise anything.
                raise RequestError(f"the template refused the row: {error}") from error
        name = self._options.prompt_column or ""
        if name not in row:
            raise RequestError(f"the row has no column {name!r}; {nearest(name, list(row))}")
        if not isinstance(row[name], str):
            raise RequestError(f"column {name!r} must be a string, got {repr_short(row[name])}")
        return str(row[name])

    def _as_chat(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        if self._options.chat:
            return self._conversation(prompt)
        template = str(self._chat_template() or "")
        if template and not any(mark in prompt for mark in _chat_marks(template)):
            self._warn("chat", RAW_PROMPTS)
        return prompt

    def _conversation(self, text: str) -> dict[str, Any]:
        """The first messages of a conversation: the system message, then the user's."""
        said = [("system", self._options.system), ("user", text)]
        messages = [{"role": role, "content": one} for role, one in said if one is not None]
        return {"messages": messages}

    def _fill_simple(self, task: Task, row: Mapping[str, Any]) -> None:
        given = _given(row, PROMPT_KEYS)
        self._check_template(given)
        for name, one in row.items():
            meant = _meant(name) if one is not None else ""
            if meant and to_python(one) not in _neutral(name):
                raise RequestError(f"column {name!r} has no effect: {meant}; {OTHERS_ARE_DATA}")
        if isinstance(row.get("model"), str):
            self._check_model(row["model"])
        own = self._with_form(task, _given(row, _PARAMS), given.get("tools"))
        task.params = self._params_for(own, "simple")
        turns = to_python(row.get("turns"))
        if turns is None:
            alone = given.keys() == {"prompt"}
            task.prompt = self._as_chat(given["prompt"] if alone else given)
            return
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise RequestError(f"'turns' must be a list of strings, got {repr_short(turns)}")
        if task.params.n != 1:
            raise RequestError(f"n must be 1 in a row with 'turns', got {task.params.n}")
        if not given.keys().isdisjoint(CONTENT_KEYS):
            raise RequestError("'turns' stands beside another prompt: give one of them")
        task.turns = turns[1:]
        task.prompt = {**given, **self._conversation(turns[0])}

    # --- OpenAI rows ----------------------------------------------------------------------------

    def _fill_openai(self, task: Task, row: Mapping[str, Any]) -> None:
        known = KINDS.get(row["url"]) if isinstance(row.get("url"), str) else None
        task.kind = known or "chat"
        task.custom_id = row.get("custom_id")
        if not isinstance(task.custom_id, str):
            raise RequestError(f"custom_id must be a string, got {repr_short(task.custom_id)}")
        task.key = task.custom_id
        pooled, names = "", BODY.get(task.kind, {})
        if known is None:
            from nanoengine.jobs import pooled as other

            pooled = other.KINDS.get(str(row.get("url")), "")
            if not pooled or self._pools is None:
                urls = ", ".join([*KINDS, *(other.KINDS if self._pools else ())])
                raise RowError(
                    "unknown_url", f"url must be one of {urls}, got {repr_short(row.get('url'))}"
                )
            task.kind, names = "pooled", dict.fromkeys((*other.BODY[pooled], *NOTES))
        if row.get("method", "POST") != "POST":
            raise RequestError(f"method must be 'POST', got {repr_short(row['method'])}")
        if not isinstance(row.get("body"), dict):
            raise RequestError(f"body must be an object, got {repr_short(row.get('body'))}")
        body = {name: value for name, value in row["body"].items() if value is not None}
        self._check_names(body, names)
        for name in row.keys() - {"custom_id", "method", "url", "body"}:
            if name in names and name not in NOTES and not self._options.ignore_unknown:
                raise RequestError(f"{name!r} has no effect beside the body: put it into the body")
            self._warn("beside", f"fields beside the body are neither read nor kept: {name!r}")
        self._check_model(body.get("model"))
        if pooled:
            assert self._pools is not None
            task.parts, task.params, task.answer = other.read(pooled, body, self._pools())
            task.prompt = task.parts[0]
        elif known == "chat":
            self._fill_chat(task, body)
        else:
            task.prompt = _completion_prompt(body)
            task.params = self._params_for(body, "completion")

    def _check_names(self, body: dict[str, Any], names: dict[str, None]) -> None:
        for name in body.keys() - names.keys():
            if not self._options.ignore_unknown:
                raise RequestError(f"unknown field {name!r} in the body; {nearest(name, names)}")
            del body[name]

    def _check_model(self, model: object) -> None:
        """Warns once per name if a row asks for another model; the loaded one answers it."""
        if model is None or self._options.any_model:
            return
        if not isinstance(model, str):
            raise RequestError(f"model must be a string, got {repr_short(model)}")
        if model != self._model:
            self._warn(
                f"model {model}",
                f"rows ask for model {repr_short(model)}, and {self._model!r} answers them;"
                " --any-model says that this is meant",
            )

    def _warn(self, key: str, message: str) -> None:
        """Warns once per key."""
        if key not in self._warned and len(self._warned) < KNOWN_PARAMS:
            self._warned.add(key)
            warnings.warn(message, stacklevel=1)

    def _check_template(self, prompt: Mapping[str, Any]) -> None:
        if "chat_template" in prompt and not self._options.trust_row_templates:
            raise RequestError(
                "chat_template: a template is a program, and rows are data; trust_row_templates"
                " (--trust-row-templates) runs those of rows"
            )

    def _fill_chat(self, task: Task, body: dict[str, Any]) -> None:
        if "messages" not in body:
            raise RequestError("the body has no messages")
        prompt = _given(body, ("messages", *TEMPLATE_KEYS, "cache_salt"))
        self._check_template(prompt)
        tools = prompt.get("tools")
        if body.get("tool_choice") == "none":
            prompt.pop("tools", None)
        if "reasoning_effort" in body:
            variables = prompt.get("chat_template_kwargs", {})
            if isinstance(variables, dict):  # else `LLM.stream` reports the type
                effort = {"reasoning_effort": body["reasoning_effort"]}
                prompt["chat_template_kwargs"] = {**effort, **variables}
        task.prompt = prompt
        asked, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
        if not isinstance(asked, bool):
            raise RequestError(f"logprobs must be true or false in a chat, got {repr_short(asked)}")
        if top is not None and not asked:
            raise RequestError("top_logprobs needs logprobs: true")
        if asked:
            body["logprobs"] = 0 if top is None else top
        choice = body.pop("tool_choice", None)
        task.params = self._params_for(self._with_form(task, body, tools, choice), "chat")

    # --- the form of answers --------------------------------------------------------------------

    def _with_form(
        self, task: Task, own: dict[str, Any], tools: Any = None, choice: Any = None
    ) -> dict[str, Any]:
        """A row's parameters, with the ones that its output parser needs."""
        options, is_chat = self._options, task.kind == "chat"
        if not options.takes_apart and not (is_chat and (tools or choice)):
            return own
        from nanoengine.features.output_parser import TWO_CONSTRAINTS, make_parser, parser_name

        reader = options.tool_call_parser
        if reader is None and is_chat and tools and choice in (None, "auto"):
            try:
                reader = parser_name("tool_call_parser", "auto", self._chat_template)
            except RequestError:
                warnings.warn(NO_FORM, stacklevel=1)
        tools = tools if isinstance(tools, list) else None  # else `LLM.stream` reports the type
        asked = (options.reasoning_parser, reader, tools, choice)
        task.form = form = make_parser(*asked, self._chat_template)
        if form is None:
            return own
        if form.is_constrained:
            is_text = own.pop("response_format", None) in (None, {"type": "text"})
            if not is_text or "structured_outputs" in own:
                raise RequestError(TWO_CONSTRAINTS)
        return form.required_fields() | own  # Why last: the row's own values take precedence.

    # --- sampling parameters --------------------------------------------------------------------

    def _params_for(self, given: Mapping[str, Any], kind: Kind) -> SamplingParams:
        """The job's parameters with the row's own; equal parameters share one object."""
        own = {name: value for name, value in given.items() if name in _PARAMS}
        key = f"{kind}{own!r}"
        params = self._params.get(key)
        if params is None:
            params = self._make_params(own, kind)
            if len(self._params) >= KNOWN_PARAMS:
                self._params.clear()
            if len(key) <= KNOWN_CHARS:
                self._params[key] = params
        return params

    def _make_params(self, own: dict[str, Any], kind: Kind) -> SamplingParams:
        if own.get("response_format") is not None:
            own["response_format"] = _structured(own["response_format"])
        own = translate(own, OPENAI, RequestError)
        biases = own.get("logit_bias")
        if isinstance(biases, dict):
            # Why: keys of JSON objects are strings.
            ids = (int(k) if isinstance(k, str) and k.isdecimal() else k for k in biases)
            own["logit_bias"] = dict(zip(ids, biases.values(), strict=True))
        return SamplingParams(**{"max_tokens": MAX_TOKENS[kind], **self._base, **own})


@functools.lru_cache
def _chat_marks(template: str) -> list[str]:
    """Markers that a chat template puts around messages; a prompt with one is already rendered."""
    return CHAT_MARK.findall(template)


def _given(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The row's values with these names; null counts as missing."""
    return {name: to_python(row[name]) for name in names if row.get(name) is not None}


@functools.lru_cache(KNOWN_PARAMS)
def _meant(column: str) -> str:
    """A hint for a column of a simple row that has no effect; empty if it is data."""
    refused = OPENAI.get(column, {}).get("refused")
    if refused is not None or column in ELSEWHERE:
        return refused or f"give {ELSEWHERE[column]}"
    letters = _letters(column)
    near = difflib.get_close_matches(letters, OPTIONS, n=1, cutoff=LEAST_LIKENESS)
    is_data = not near or len(letters) < LEAST_NAME or column in (*PROMPT_KEYS, *_PARAMS)
    return "" if is_data else f"did you mean {OPTIONS[near[0]]!r}?"


def _neutral(column: str) -> tuple[Any, ...]:
    """Values of a refused column that are accepted, because they ask for nothing."""
    entry = OPENAI.get(column, {"unless": ()})
    return tuple(entry.get("unless", (None, False)))


def _letters(name: object) -> str:
    return re.sub("[^a-z]", "", str(name).lower())


OPTIONS = {
    _letters(name): name
    for name in (*TEMPLATE_KEYS, "cache_salt", *_PARAMS)
    if "refused" not in OPENAI.get(name, {}) and name not in ("tools", "priority")
}
"""Options that a column may be a typo of; the excluded names are too similar to data columns."""


def _structured(response_format: object) -> dict[str, Any] | None:
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
        " 'json_schema', 'json_schema': {'schema': {...}}}, got " + repr_short(response_format)
    )


def _completion_prompt(body: Mapping[str, Any]) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise RequestError(f"prompt must be one prompt, got {len(prompt)}: give each a row")
    if not isinstance(prompt, str | list):
        raise RequestError(f"prompt must be a string or token ids, got {repr_short(prompt)}")
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt} | ({"cache_salt": body["cache_salt"]} if "cache_salt" in body else {})


def kind_of(lines: Iterable[Line]) -> Kind:
    """The form of an input, from its first row that can be parsed."""
    row = next(_readable(lines), "")
    if not isinstance(row, dict) or any(row.get(n) is not None for n in (*CONTENT_KEYS, "turns")):
        return "simple"
    return "chat" if "body" in row or "custom_id" in row else "simple"


def _readable(lines: Iterable[Line]) -> Iterator[Any]:
    """The rows that can be parsed among the first lines of an input."""
    for line in itertools.islice(lines, SNIFFED_ROWS):
        with contextlib.suppress(RowError):
            yield value(line)


def require_columns(inputs: Iterable[Input], options: RowOptions, max_row_bytes: int) -> None:
    """Checks that the rows of each file have the columns that prompts are made from.

    Raises:
        ConfigError: none of the first rows has them, or the header of a CSV can't be parsed.
    """
    reader = RowReader(options)
    for one in inputs:
        if one.name == STDIN or not (options.columns_alone or one.form in ("csv", "parquet")):
            continue
        lines, names = read_lines([one], max_row_bytes), dict[str, None]()
        first = next(lines, None)
        error = first.content if first and isinstance(first.content, RowError) else None
        if error and one.form == "csv" and error.code == "unreadable_input":
            raise ConfigError(f"input {one.name!r}: {error}")
        for row in _readable(itertools.chain([first] if first else [], lines)):
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
                if not reader.lacks_prompt(row):
                    break
        else:
            if names or one.form == "txt":
                wanted = options.prompt_column or options.template or "prompt"
                raise ConfigError(
                    f"no row of {one.name!r} has what makes a prompt, {wanted!r}: its columns are"
                    f" {repr_short(list(names))}; --prompt-column names one, --template takes"
                    " several"
                )


def value(line: Line) -> Any:
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
        text = content.decode()
        if line.input.form == "txt":
            return text.rstrip("\r\n")
        found = JSON.decode(text)
        if text.count("[") + text.count("{") > MOST_DEPTH:
            _check_depth(found)
        return found
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError("unreadable_row", f"the line is not UTF-8: {error}; {AS_UTF8}") from error
    except (ValueError, RecursionError) as error:
        raise RowError("unreadable_row", f"the line is not JSON: {error}") from error


def _check_depth(value: Any) -> None:
    """Raises RecursionError if the value is nested too deeply to be serialized again."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [v for one in inner for v in one if isinstance(v, dict | list)]
        if not level:
            return
    raise RecursionError(f"lists and objects lie more than {MOST_DEPTH} deep")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        told = f"{text:.40} is more than a 64-bit float holds: write it as a string"
        raise RowError("unreadable_row", told)
    return number


JSON = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _names_in(template: str) -> list[str]:
    """The columns that a template uses.

    Raises:
        ConfigError: it is not valid Jinja.
    """
    try:
        return TEMPLATES.render(template, None).split()
    except (ValueError, TimeoutError, MemoryError) as error:
        raise ConfigError(f"--template is no Jinja: {error}") from error
