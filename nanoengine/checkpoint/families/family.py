"""Family: how the config.json of one family is read; and functions for reading its keys.

A field of `LayerConfig`, `LinearAttentionConfig` or `MoEConfig` is given as a value, or as a
function that computes it from a ConfigReader, such as `key("mlp_bias")`. Functions read only keys
that the family supports; `ConfigReader` rejects the others. Other functions determine which layers
have a sliding window, and which layers apply RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader, Json
from nanoengine.checkpoint.layer_config import (
    SLIDING,
    LayerConfig,
    LinearAttentionConfig,
    MoEConfig,
)
from nanoengine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from nanoengine.checkpoint.gguf_keys import Metadata

T = TypeVar("T")
Reader = Callable[[ConfigReader], T]


def key(name: str, make: Callable[[Any], Any] | None = None) -> Reader[Any]:
    """Returns a reader of a key; `make` converts its value."""
    return lambda keys: make(keys.get(name)) if make else keys.get(name)


def from_keys(*names: str) -> dict[str, Reader[Any]]:
    """Readers of fields that have the same names as their keys."""
    return {name: key(name) for name in names}


def size(*names: str) -> Reader[int]:
    """Returns a reader of a required size: the first of these keys that is present."""

    def read(keys: ConfigReader) -> int:
        for name in names:
            if name in keys:
                return keys.require(name)
        either = " or ".join(dict.fromkeys(names))
        raise UnsupportedModelError(
            f"config.json needs {either}, from 1 to {SCHEMA[names[0]].maximum:,}"
        )

    return read


def make(kind: Callable[..., T], fields: Mapping[str, Any], keys: ConfigReader) -> T:
    """Creates a config from fields that are values or readers."""
    return kind(**{n: value(keys) if callable(value) else value for n, value in fields.items()})


def layer(only: Mapping[str, tuple[Any, ...]] | None = None, **fields: Any) -> Reader[LayerConfig]:
    """Returns a reader of a LayerConfig with these fields, which are values or readers. `only` has
    the supported values of further keys."""

    def read(keys: ConfigReader) -> LayerConfig:
        for name, values in (only or {}).items():
            keys.require_one_of(name, *values)
        return make(LayerConfig, fields, keys)

    return read


@dataclass(frozen=True, slots=True)
class GGUFFiles:
    """The differences between GGUF files and checkpoints of a family.

    Attributes:
        when: whether a file belongs to this family, if several families have the same GGUF
            architecture; None: all files that belong to no other family.
        constants: values of config.json keys that the files lack.
        read: computes config.json keys from metadata with another meaning.
        names: parts of tensor names -> ours, if they differ from `gguf_tensors.TENSOR_NAMES`.
        interleaved: rows of queries and keys are in the order for interleaved RoPE, unlike in
            checkpoints.
        full_every: every n-th layer has full attention, the others have the sliding window of the
            file; 0: the family determines it.
        ignored_keys: metadata keys that do not affect text.
        values: parameters of the model that are metadata: full name -> value.
        one_plus_weight: norms are stored as 1 + weight, for transformers' modules.
        tiled: see `LinearAttentionConfig.tiled`.
    """

    when: Callable[[Metadata], Any] | None = None
    constants: Json = field(default_factory=dict)
    read: Callable[[Metadata], Json] = lambda metadata: {}
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    full_every: int = 0
    ignored_keys: tuple[str, ...] = ()
    values: Callable[[Metadata], Mapping[str, float]] = lambda metadata: {}
    one_plus_weight: bool = False
    tiled: bool = False


def files(*architectures: str, **fields: Any) -> dict[str, GGUFFiles]:
    """GGUF architecture -> its files, for several architectures with the same differences."""
    return dict.fromkeys(architectures, GGUFFiles(**fields))


def has(key: str) -> Callable[[Metadata], Any]:
    """Returns a function that checks whether a GGUF file has this key with a nonzero value."""
    return lambda metadata: metadata.get(key, Any)


def layers_of(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    """The indices of the layers of this kind."""
    return tuple(n for n, each in enumerate(kinds) if each == kind)


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""

WindowsReader = Callable[[ConfigReader, Kinds, int], list[bool]]
"""Arguments: the config, its `layer_types`, and the number of layers. Returns per layer whether it
has a sliding window."""


def windows(
    pattern: Callable[[ConfigReader, int], bool] = lambda keys, layer: True,
    *,
    needs_flag: bool = False,
    has_types: bool = True,
) -> WindowsReader:
    """Returns a WindowsReader. No layer has a window if `sliding_window` is null; otherwise
    `layer_types` or a pattern determine the layers.

    Args:
        pattern: whether a layer has a window, if `layer_types` is absent.
        needs_flag: layers have a window only if `use_sliding_window` is set.
        has_types: the family has the key `layer_types`.
    """

    def slides(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
        enabled = not needs_flag or keys.get("use_sliding_window")
        if keys.get("sliding_window") is None or not enabled:
            return [False] * layers
        return _sliding(kinds) if has_types and kinds else [pattern(keys, n) for n in range(layers)]

    return slides


def smollm_window(keys: ConfigReader, layer: int) -> bool:
    """SmolLM3: layers without RoPE have a window."""
    return not smollm_rope(keys, [False] * keys.require("num_hidden_layers"))[layer]


def all_but_every(number: int | str = "sliding_window_pattern") -> WindowsReader:
    """Returns a WindowsReader: layers have a window as in `layer_types`, or else all except every
    n-th, where n is `number` or the value of this key. `sliding_window` is required."""

    def slides(keys: ConfigReader, kinds: Kinds, layers: int) -> list[bool]:
        if kinds is not None:
            return _sliding(kinds)
        every = keys.get(number) if isinstance(number, str) else number
        if isinstance(every, str):
            return [every[n % len(every)] == "L" and n + 1 < layers for n in range(layers)]
        if not 1 <= every <= 10_000:
            raise UnsupportedModelError(
                f"config.json: {number} must be from 1 to 10,000, got {every}"
            )
        return [(n + 1) % every != 0 for n in range(layers)]

    return slides


def _sliding(kinds: Sequence[str]) -> list[bool]:
    return [kind == SLIDING for kind in kinds]


# --- which layers apply RoPE ----------------------------------------------------------------------

RopeReader = Callable[[ConfigReader, Sequence[bool]], Sequence[bool]]
"""Arguments: the config, and per layer whether it has a window. Returns per layer whether it
applies RoPE."""


def exaone_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[bool]:
    """EXAONE 4: in models with windows, layers with full attention have no RoPE."""
    return slides if keys.get("sliding_window") is not None else [True] * len(slides)


def if_named_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[bool]:
    """Granite 4: layers have RoPE if `position_embedding_type` is "rope"."""
    return [keys.get("position_embedding_type") == "rope"] * len(slides)


def smollm_rope(keys: ConfigReader, slides: Sequence[bool]) -> Sequence[bool]:
    """SmolLM3: `no_rope_layers` has a 0 for each layer without RoPE."""
    every, listed = keys.get("no_rope_layer_interval"), keys.get("no_rope_layers")
    layers = len(slides)
    rope = listed or [int((n + 1) % every != 0) for n in range(layers)]
    if len(rope) < layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(rope)} entries; it must have num_hidden_layers={layers}"
        )
    return [each != 0 for each in rope[:layers]]


# --- a family -------------------------------------------------------------------------------------

PLAIN, INTERMEDIATE_SIZE = layer(), size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Family:
    """How the config.json and the tensors of one family are read. Defaults are Llama's.

    Attributes:
        model_type: `model_type` in config.json.
        normalize: converts a config.json of the family to the usual keys.
        layers: reads what the layers compute.
        states: reads which layers are recurrent and what they compute; None: no layer is recurrent.
        windows: which layers have the sliding window.
        rope_layers: which layers apply RoPE.
        rope_theta_keys: the keys of RoPE's base in layers with full attention and in layers with a
            window; None: the base is the same in all layers.
        moe: reads the mixture of experts.
        partial_rotary: `partial_rotary_factor` is supported; otherwise RoPE is applied to whole
            heads.
        defaults: values of absent keys, if neither transformers' config class (`defaults.json`) nor
            `SCHEMA` has them.
        rope_extra: further keys of `rope_parameters` -> whether they affect text.
        names: parts of our tensor names -> their names in checkpoints.
        ignored_tensors: regular expression of prefixes of tensors that are not loaded, such as MTP
            layers.
        intermediate_size: reads the intermediate size of the MLP.
        norm_eps: the key of the epsilon of norms.
        gguf: architectures of the family's GGUF files -> their differences from checkpoints.
    """

    model_type: str
    normalize: Callable[[Json], Json] | None = None
    layers: Reader[LayerConfig] = PLAIN
    states: Reader[LinearAttentionConfig] | None = None
    windows: WindowsReader = lambda keys, kinds, layers: [False] * layers
    rope_layers: RopeReader = lambda keys, slides: [True] * len(slides)
    rope_theta_keys: tuple[str, str] | None = None
    moe: Reader[MoEConfig | None] | None = None
    partial_rotary: bool = False
    defaults: Json = field(default_factory=dict)
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ignored_tensors: str = ""
    intermediate_size: Reader[int] = INTERMEDIATE_SIZE
    norm_eps: str = "rms_norm_eps"
    gguf: Mapping[str, GGUFFiles] = field(default_factory=dict)
