"""vLLM's SamplingParams and StructuredOutputsParams, which are mutable.

A `VLLMParams` stores the given values under vLLM's names, with its defaults. `to_native` converts
it to frozen parameters at each call, which validates them. So all changes of attributes, and of
lists in them, have an effect.
"""

from __future__ import annotations

import copy
import enum
import inspect
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.settings import params as native
from nanoengine.settings.checks import join_names, nearest, quoted
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.pooling import TASKS, PoolingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.settings.vllm_names import NAMES


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` returns for a growing request: all text, only new text, or nothing."""

    CUMULATIVE, DELTA, FINAL_ONLY = range(3)


NATIVE = tuple(native.DEFAULTS)[[*native.DEFAULTS].index("prompt_logprobs_start") :]
"""Fields of nanoengine's SamplingParams that vLLM does not have: the last ones."""

DEFAULTS: dict[str, Any] = {
    **{name: default for name, default in native.DEFAULTS.items() if name not in NATIVE},
    **{n: e["default"] for n, e in NAMES["SamplingParams"].items() if "default" in e},
    "output_kind": RequestOutputKind.CUMULATIVE,
}
"""Name -> vLLM's default; includes names of older versions."""

BACKENDS = tuple(filter(None, NAMES["LLM"]["guided_decoding_backend"]["only"]))

LISTS = ("stop", "stop_token_ids", "bad_words")
"""Fields that are lists in every VLLMParams, so that programs can append to them."""


class VLLMParams:
    """vLLM's SamplingParams.

    Raises:
        RequestError: a value is not supported or out of range, or a name is unknown.
    """

    # Why three: programs inspect one of them for the allowed names.
    __struct_fields__ = tuple(DEFAULTS)
    __annotations__ = dict.fromkeys(DEFAULTS, Any)
    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in DEFAULTS.items()
        ]
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            arguments = self.__signature__.bind(*args, **options).arguments
        except TypeError as error:
            raise RequestError(f"vLLM's SamplingParams: {error}") from error
        for name, value in arguments.items():
            setattr(self, name, value)
        for name in LISTS:
            value = getattr(self, name) or ()
            setattr(self, name, [value] if isinstance(value, str) else list(value))
        self.to_native()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS:
            hint = nearest(name, DEFAULTS)
            raise RequestError(f"unknown option {name!r} of SamplingParams; {hint}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(f"SamplingParams has no {name!r} in nanoengine")
        return DEFAULTS[name]

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{n}={v!r}' for n, v in self._changed().items())})"

    def _changed(self) -> dict[str, Any]:
        """The values that differ from the defaults; 1 and True count as different."""
        defaults = DEFAULTS | {name: [] for name in LISTS}
        return {n: v for n, v in vars(self).items() if repr(v) != repr(defaults[n])}

    def clone(self) -> VLLMParams:
        """An independent copy."""
        return copy.deepcopy(self)

    @classmethod
    def from_optional(cls, **options: Any) -> VLLMParams:
        """Creates parameters from options; None selects the default."""
        none = {"max_tokens"} & options.keys()  # Why: here None is a value.
        return cls(**{n: v for n, v in options.items() if v is not None or n in none})

    def to_native(self) -> SamplingParams:
        """Converts to the frozen parameters of `LLM`."""
        options = self._changed()
        options.pop("output_kind", None)  # Why: only LLMEngine uses it; generate() is final.
        if {"guided_decoding", "structured_outputs"} <= options.keys():
            raise RequestError("guided_decoding means structured_outputs: set one of them")
        structured = options.pop("guided_decoding", None) or options.get("structured_outputs")
        if isinstance(structured, dict):
            structured = VLLMStructuredOutputs(**structured)
        if isinstance(structured, VLLMStructuredOutputs):
            options["structured_outputs"] = structured.to_native()
        return SamplingParams(**options)


@dataclass
class VLLMStructuredOutputs:
    """vLLM's StructuredOutputsParams, and the GuidedDecodingParams of older versions.

    `json` may also be a Pydantic class, which is replaced by its schema. llguidance compiles all
    formats, whatever `backend` is.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()
        if self.backend is not None and self.backend.partition(":")[0] not in BACKENDS:
            allowed = ", ".join(BACKENDS)
            raise RequestError(f"backend must be one of {allowed}, got {quoted(self.backend)}")
        self.to_native()

    @classmethod
    def from_optional(cls, **options: Any) -> VLLMStructuredOutputs | None:
        """The requested format; None if there is none."""
        options = {name: value for name, value in options.items() if value is not None}
        return cls(**options) if options.keys() - {"backend", "whitespace_pattern"} else None

    def to_native(self) -> StructuredOutputs:
        """Converts to the format in `SamplingParams`."""
        fields = {**vars(self), "backend": None}
        return StructuredOutputs(**{n: v for n, v in fields.items() if v not in (None, False)})


@dataclass
class VLLMPooler:
    """vLLM's PoolerConfig: an LLM's default pooling parameters.

    Raises:
        RequestError: the pooling is not implemented.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None

    def __post_init__(self) -> None:
        self.to_native()

    def to_native(self) -> PoolingParams:
        """Converts to the parameters of a call; only `encode` returns all tokens' results."""
        if self.task not in (None, *TASKS):
            raise RequestError(f"task must be one of {join_names(TASKS)}, got {quoted(self.task)}")
        token_pooling = self.tok_pooling_type
        if token_pooling not in (None, "ALL"):
            raise RequestError(f"tok_pooling_type must be ALL, got {quoted(token_pooling)}")
        kind = (self.pooling_type or self.seq_pooling_type or "all").lower()
        fields = {**vars(self), "pooling": None if kind == "all" else kind}
        for name in ("task", "pooling_type", "seq_pooling_type", "tok_pooling_type"):
            del fields[name]
        return PoolingParams(**{n: v for n, v in fields.items() if v is not None})


def to_native(params: Any) -> Any:
    """Converts parameters of a call, one or a list of them, for `LLM.generate`."""
    if isinstance(params, VLLMParams):
        return params.to_native()
    return [to_native(p) for p in params] if isinstance(params, list | tuple) else params
