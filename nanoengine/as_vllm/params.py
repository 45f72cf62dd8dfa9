"""SamplingParams and StructuredOutputsParams as vLLM's programs have them: they change.

A `VLLMParams` holds what was given, under vLLM's names and with its defaults; `ours` makes the
frozen parameters of it at each call, which says what is wrong. So whatever a program has done to an
attribute, or to a list in it, counts.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.settings.checks import nearest, shown
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.settings.vllm_names import BACKENDS, SAMPLING_PARAMS


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` returns of a request that grows: all so far, what is new, nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


OWN = ("priority", "prompt_logprobs_start")
"""Fields of ours that vLLM has not."""

DEFAULTS: dict[str, Any] = {
    **{f.name: f.default for f in dataclasses.fields(SamplingParams) if f.name not in OWN},
    **dict.fromkeys(SAMPLING_PARAMS),
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "flat_logprobs": False,
    "spaces_between_special_tokens": True,
    "skip_clone": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "watermarking": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
} | {"seed": None, "logprobs": None, "prompt_logprobs": None}
"""Name -> vLLM's default; of names that older versions had, too."""

LISTS = ("stop", "stop_token_ids", "bad_words")
"""Fields that are lists once they are set, so that programs append to them."""


class VLLMParams:
    """vLLM's SamplingParams.

    Raises:
        RequestError: a value can't be obeyed, is out of range or of an unknown name.
    """

    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, *args: Any, **options: Any) -> None:
        given = dict(zip(DEFAULTS, args, strict=False))
        if len(given) < len(args) or not given.keys().isdisjoint(options):
            raise RequestError(f"give parameters by name: got {shown(args)} and {shown(options)}")
        for name, value in (given | options).items():
            setattr(self, name, value)
        for name in LISTS:
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str) else list(value or ()))
        self.ours()

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VLLMParams) and self._changed() == other._changed()

    __hash__ = None  # type: ignore[assignment]

    def _changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {
            name: value
            for name, value in vars(self).items()
            if not _same(value, [] if name in LISTS else DEFAULTS[name])
        }

    def clone(self) -> VLLMParams:
        """A copy that changes for itself; logits processors are shared."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if name != "logits_processors":
                object.__setattr__(made, name, copy.deepcopy(value))
        return made

    @classmethod
    def from_optional(cls, **options: Any) -> VLLMParams:
        """Parameters of options that may be None, which asks for the default."""
        return cls(
            **{n: v for n, v in options.items() if v is not None or DEFAULTS.get(n) is None},
            **({"max_tokens": None} if options.get("max_tokens", 0) is None else {}),
        )

    def ours(self) -> SamplingParams:
        """The same as the frozen parameters of `LLM`."""
        options = self._changed()
        options.pop("output_kind", None)  # Why: LLMEngine obeys it, and generate() is final.
        guided = options.pop("guided_decoding", None)
        if guided is not None:
            if options.get("structured_outputs") is not None:
                raise RequestError("guided_decoding and structured_outputs are one: give one")
            options["structured_outputs"] = guided
        asked = options.get("structured_outputs")
        if isinstance(asked, dict):
            asked = VLLMForm(**asked)
        if isinstance(asked, VLLMForm):
            options["structured_outputs"] = asked.ours()
        return SamplingParams(**options)


@dataclass
class VLLMForm:
    """vLLM's StructuredOutputsParams, and the GuidedDecodingParams of its older versions.

    `json` may be a Pydantic class too, which stands for its schema.
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
        make = getattr(self.json, "model_json_schema", None)
        if make is not None:
            self.json = make()
        if self.backend is not None and self.backend.partition(":")[0] not in BACKENDS:
            allowed = ", ".join(BACKENDS)
            raise RequestError(f"backend must be one of {allowed}, got {shown(self.backend)}")
        self.ours()

    @classmethod
    def from_optional(cls, **options: Any) -> VLLMForm | None:
        """The form that is asked for; None if none is."""
        given = {name: value for name, value in options.items() if value is not None}
        return cls(**given) if given.keys() - {"backend", "whitespace_pattern"} else None

    def ours(self) -> StructuredOutputs:
        """The same as the form of `SamplingParams`; llguidance compiles it, whatever `backend`."""
        given = dataclasses.asdict(self)
        del given["backend"]
        return StructuredOutputs(**{n: v for n, v in given.items() if v not in (None, False)})


def ours(params: Any) -> Any:
    """Parameters of a call, one or a list of them, as `LLM.generate` takes them."""
    if isinstance(params, VLLMParams):
        return params.ours()
    return list(map(ours, params)) if isinstance(params, list | tuple) else params


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default
