"""Family: the meaning of one family's config.json, and functions that read its fields.

A field of `LayerConfig`, `LinearAttentionConfig` or `MoEConfig` is a value, or a function of the
config's keys, such as `key("mlp_bias")`. The function reads only keys that the family supports;
`ConfigReader` rejects the others. Further functions determine which layers have a sliding window,
and which apply RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from nanoengine.checkpoint.config_reader import KEYS, ConfigReader, Json
from nanoengine.checkpoint.layer_config import (
    SLIDING,
    LayerConfig,
    LinearAttentionConfig,
    MoEConfig,
)
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import repr_short

if TYPE_CHECKING:
    from nanoengine.checkpoint.gguf_keys import Metadata

T = TypeVar("T")
Reader = Callable[[ConfigReader], T]


def key(name: str, make: Callable[[Any], Any] | None = None) -> Reader[Any]:
    """Reads a key; `make` computes the field from its value."""
    return lambda keys: make(keys.get(name)) if make else keys.get(name)


def same(*names: str) -> dict[str, Reader[Any]]:
    """Fields of a plan that have the same name as their key."""
    return {name: key(name) for name in names}


def biases(name: str) -> dict[str, Reader[Any]]:
    """Bias fields of a plan that all depend on this key."""
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), key(name))


def size(*names: str) -> Reader[int]:
    """Reads the first of these keys that is present; the model needs one."""

    def read(keys: ConfigReader) -> int:
        for name in names:
            if name in keys:
                return keys.require(name)
        either = " or ".join(dict.fromkeys(names))
        raise UnsupportedModelError(
            f"config.json needs {either}, from 1 to {KEYS[names[0]].most:,}"
        )

    return read


def made(kind: Callable[..., T], fields: Mapping[str, Any], keys: ConfigReader) -> T:
    """Makes a plan from fields that are values or readers."""
    return kind(**{n: value(keys) if callable(value) else value for n, value in fields.items()})


def plan(only: Mapping[str, tuple[Any, ...]] | None = None, **fields: Any) -> Reader[LayerConfig]:
    """A reader of a plan with these fields; `only`: keys -> the implemented values."""

    def read(keys: ConfigReader) -> LayerConfig:
        for name, values in (only or {}).items():
            keys.allow(name, *values)
        return made(LayerConfig, fields, keys)

    return read


@dataclass(frozen=True, slots=True)
class GGUFFiles:
    """The differences between a family's GGUF files and its checkpoints.

    Attributes:
        when: whether a file belongs to this family, if several families share its architecture;
            None: it does, unless it belongs to another one.
        fixed: values of config.json keys that the files do not have.
        read: reads keys whose meaning differs from config.json.
        names: parts of its tensors' names -> ours, if they differ from `gguf_tensors.NAMES`.
        pairs: rows of queries and keys are ordered for interleaved RoPE, unlike in the family's
            checkpoints.
        slides: all layers but every n-th have the file's sliding window; 0: the family decides.
        unread: metadata keys that don't affect text.
        tiled: value heads of linear attention have another order: see `gguf_tensors.py`.
    """

    when: Callable[[Metadata], Any] | None = None
    fixed: Json = field(default_factory=dict)
    read: Callable[[Metadata], Json] = lambda given: {}
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    slides: int = 0
    unread: tuple[str, ...] = ()
    tiled: bool = False


def files(*architectures: str, **fields: Any) -> dict[str, GGUFFiles]:
    """GGUF files of these architectures."""
    return dict.fromkeys(architectures, GGUFFiles(**fields))


def has(key: str) -> Callable[[Metadata], Any]:
    """Whether a GGUF file has a key with a nonzero value."""
    return lambda given: given.get(key, Any)


def layers_of(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    """The indices of the layers of this kind."""
    return tuple(n for n, given in enumerate(kinds) if given == kind)


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""

WindowsReader = Callable[[ConfigReader, Kinds, int], list[bool]]
"""The third argument is the number of layers."""


def never(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
    return [False] * layers


def windows(
    pattern: Callable[[ConfigReader, int], bool] = lambda keys, layer: True,
    *,
    asked: bool = False,
    named: bool = True,
) -> WindowsReader:
    """Returns a reader of the layers with a window: none if `sliding_window` is null; else the ones
    in `layer_types`; else by a pattern.

    Args:
        pattern: whether a layer has a window.
        asked: no layer has one unless `use_sliding_window` is set.
        named: the family has `layer_types`.
    """

    def slides(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
        wanted = not asked or keys.get("use_sliding_window")
        if keys.get("sliding_window") is None or not wanted:
            return [False] * layers
        return _named(kinds) if named and kinds else [pattern(keys, n) for n in range(layers)]

    return slides


def from_max_window_layers(keys: ConfigReader, layer: int) -> bool:
    return layer >= keys.get("max_window_layers")


def smollm_window(keys: ConfigReader, layer: int) -> bool:
    """The layers that do not apply RoPE."""
    return not smollm_rope(keys, [False] * keys.require("num_hidden_layers"))[layer]


def all_but_every(number: int | str = "sliding_window_pattern") -> WindowsReader:
    """Returns a reader: the layers in `layer_types`, else every layer but each n-th, where n is
    this number or the value of this key. A model that has such layers needs a window."""

    def slides(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
        if kinds is not None:
            return _named(kinds)
        every = keys.get(number) if isinstance(number, str) else number
        if isinstance(every, str):
            return [every[n % len(every)] == "L" and n + 1 < layers for n in range(layers)]
        if not 1 <= every <= 10_000:
            raise UnsupportedModelError(
                f"config.json: {number} must be from 1 to 10,000, got {every}"
            )
        return [(n + 1) % every != 0 for n in range(layers)]

    return slides


def all_but_first_of_four(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
    keys.get("sliding_window")  # read even if no layer has a window
    return [n % 4 > 0 for n in range(layers)] if kinds is None else _named(kinds)


def _named(kinds: Sequence[str]) -> list[bool]:
    return [kind == SLIDING for kind in kinds]


# --- which layers apply RoPE ----------------------------------------------------------------------

RopeReader = Callable[[ConfigReader, Sequence[bool]], Sequence[float]]
"""The second argument says which layers have a window. The result has one number per layer: 0: no
RoPE; above 1: the base of RoPE."""


def always(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    return [True] * len(slides)


def only_with_window(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    return slides


def exaone_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    """In a model with windows, layers with full attention do not apply RoPE."""
    return slides if keys.get("sliding_window") is not None else always(keys, slides)


def nowhere(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    return [False] * len(slides)


def if_named_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    """Granite 4: RoPE only if `position_embedding_type` is "rope"."""
    return [keys.get("position_embedding_type") == "rope"] * len(slides)


def layer_bases(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    """Granite SWA: `layer_rope_theta` has one base per layer, or 0 for a layer without RoPE."""
    bases: Sequence[float] = keys.get("layer_rope_theta") or always(keys, slides)
    if len(bases) != len(slides) or not all(base in (0, 1) or base > 1.001 for base in bases):
        raise UnsupportedModelError(
            f"layer_rope_theta={repr_short(bases)} must have 0, or a number above 1.001, for each"
            f" of num_hidden_layers={len(slides)}"
        )
    return bases


def smollm_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[float]:
    """`no_rope_layers` has a 0 for each layer that does not apply RoPE."""
    every, given = keys.get("no_rope_layer_interval"), keys.get("no_rope_layers")
    layers = len(slides)
    rope = given or [int((n + 1) % every != 0) for n in range(layers)]
    if len(rope) < layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(rope)} entries, num_hidden_layers={layers}"
        )
    return [each != 0 for each in rope[:layers]]


# --- a family -------------------------------------------------------------------------------------

PLAIN, INTERMEDIATE_SIZE = plan(), size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Family:
    """The meaning of one family's config.json, and the differences between its checkpoints and
    Llama's.

    Attributes:
        model_type: as in config.json.
        normalize: converts its config.json to one with the usual keys.
        plan: what its layers compute.
        states: which layers are recurrent, and of what kind; None: none is.
        windows: which layers have the sliding window.
        rope_layers: which layers apply RoPE.
        bases: the keys of RoPE's base in layers with full attention, and in layers with a window,
            if the two differ; None: RoPE is the same in all layers.
        moe: its mixture of experts.
        partial: it supports `partial_rotary_factor`; others apply RoPE to whole heads.
        defaults: values of absent keys that are neither in transformers' config class
            (`defaults.json`) nor in `KEYS`.
        rope_extra: further keys of `rope_parameters` -> whether they change the computation for
            text.
        names: parts of our tensors' names -> their names in its checkpoints; or a reader that finds
            these in a config.
        ignored_tensors: regular expression that matches the start of names of tensors for drafts.
        intermediate_size: of the MLP.
        norm_eps: the key of the norms' epsilon.
        gguf: the architectures of its GGUF files, and their differences.
    """

    model_type: str
    normalize: Callable[[Json], Json] | None = None
    plan: Reader[LayerConfig] = PLAIN
    states: Reader[LinearAttentionConfig] | None = None
    windows: WindowsReader = never
    rope_layers: RopeReader = always
    bases: tuple[str, str] | None = None
    moe: Reader[MoEConfig | None] | None = None
    partial: bool = False
    defaults: Json = field(default_factory=dict)
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] | Reader[Mapping[str, str]] = field(default_factory=dict)
    ignored_tensors: str = ""
    intermediate_size: Reader[int] = INTERMEDIATE_SIZE
    norm_eps: str = "rms_norm_eps"
    gguf: Mapping[str, GGUFFiles] = field(default_factory=dict)
