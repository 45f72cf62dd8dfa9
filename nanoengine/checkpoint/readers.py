"""Readers: what a family's layers are, read from its config's keys; rows of `families.py` choose.

Three kinds: a plan of the layers, which of them have a window, and how each turns its heads;
`more_readers.py` has those of states and of experts. A reader obeys each key that it reads. Plans
are fields of `LayerPlan`, given by name: a value, or what reads one, such as `key("mlp_bias")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nanoengine.checkpoint.keys import KEYS, Keys
from nanoengine.checkpoint.plan import LayerPlan
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV = "linear_attention", "conv"
MAMBA, ATTENTION = "mamba", "attention"
"""What transformers 4 wrote for LINEAR and FULL."""

T = TypeVar("T")
Reader = Callable[[Keys], T]


def key(name: str, make: Callable[[Any], Any] | None = None) -> Reader[Any]:
    """Reads a key; `make` turns its value into the field's."""
    return lambda keys: make(keys.get(name)) if make else keys.get(name)


def biases(name: str) -> dict[str, Reader[Any]]:
    """Fields of a plan whose projections have biases where this key says so."""
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), key(name))


def size(*names: str) -> Reader[int]:
    """Reads the first of these keys that is there, which the model can't do without."""

    def read(keys: Keys) -> int:
        for name in names:
            if name in keys:
                return keys.require(name)
        told = " or ".join(dict.fromkeys(names))
        raise UnsupportedModelError(f"config.json needs {told}, from 1 to {KEYS[names[0]].most:,}")

    return read


def made(kind: Callable[..., T], fields: Mapping[str, Any], keys: Keys) -> T:
    """A plan whose fields are values or readers."""
    return kind(**{n: value(keys) if callable(value) else value for n, value in fields.items()})


# --- plans ----------------------------------------------------------------------------------------


def plan(only: Mapping[str, tuple[Any, ...]] | None = None, **fields: Any) -> Reader[LayerPlan]:
    """A plan of these fields; `only`: keys -> the values that are implemented."""

    def read(keys: Keys) -> LayerPlan:
        for name, values in (only or {}).items():
            keys.allow(name, *values)
        return made(LayerPlan, fields, keys)

    return read


def those(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(n for n, given in enumerate(kinds) if given == kind)


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""

WindowsReader = Callable[[Keys, Kinds, int], list[bool]]
"""The third argument is the number of layers."""


def never(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return [False] * layers


def windows(
    pattern: Callable[[Keys, int], list[bool]], *, asked: bool = False, named: bool = True
) -> WindowsReader:
    """None slide if `sliding_window` is null, else as `layer_types` says, else by a pattern.

    Args:
        asked: none do unless `use_sliding_window` says so either.
        named: the family has `layer_types`.
    """

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
        wanted = not asked or keys.get("use_sliding_window")
        if keys.get("sliding_window") is None or not wanted:
            return [False] * layers
        return _named(kinds) if named and kinds else pattern(keys, layers)

    return slides


def every_layer(keys: Keys, layers: int) -> list[bool]:
    return [True] * layers


def from_max_window_layers(keys: Keys, layers: int) -> list[bool]:
    return [n >= keys.get("max_window_layers") for n in range(layers)]


def no_layer(keys: Keys, layers: int) -> list[bool]:
    return [False] * layers


def alternate(keys: Keys, layers: int) -> list[bool]:
    return [n % 2 == 0 and n < keys.get("max_window_layers") for n in range(layers)]


def not_turned(keys: Keys, layers: int) -> list[bool]:
    return [not turned for turned in smollm_turned(keys, never(keys, None, layers))]


def all_but_every(number: int | str = "sliding_window_pattern") -> WindowsReader:
    """As `layer_types` says, else every layer but each n-th, n being this number, or this key.
    A model that has such layers needs a window."""

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
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


def all_but_first_of_four(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    keys.get("sliding_window")  # of a model, none of whose layers may have it
    return [n % 4 > 0 for n in range(layers)] if kinds is None else _named(kinds)


def _named(kinds: Sequence[str]) -> list[bool]:
    return [kind == SLIDING for kind in kinds]


# --- which layers turn their heads ----------------------------------------------------------------

TurnedReader = Callable[[Keys, Sequence[bool]], Sequence[float]]
"""The second argument says which layers have a window; a 0 in the answer is not turned, a number
above 1 is the base of the layer's angles."""


def always(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return [True] * len(slides)


def only_with_window(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return slides


def exaone_turned(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """In a model with windows, layers that see everything are not turned."""
    return slides if keys.get("sliding_window") is not None else always(keys, slides)


def nowhere(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return [False] * len(slides)


def if_named_rope(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """Granite 4: none unless `position_embedding_type` is "rope"."""
    return [keys.get("position_embedding_type") == "rope"] * len(slides)


def layer_bases(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """Granite SWA: `layer_rope_theta` has a base for each layer, 0 where it is not turned."""
    bases: Sequence[float] = keys.get("layer_rope_theta") or always(keys, slides)
    if len(bases) != len(slides) or not all(base in (0, 1) or base > 1.001 for base in bases):
        raise UnsupportedModelError(
            f"layer_rope_theta={shown(bases)} must have 0, or a number above 1.001, for each of"
            f" num_hidden_layers={len(slides)}"
        )
    return bases


def smollm_turned(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """`no_rope_layers` has a 0 for each layer that is not turned."""
    every, given = keys.get("no_rope_layer_interval"), keys.get("no_rope_layers")
    layers = len(slides)
    turned = given or [int((n + 1) % every != 0) for n in range(layers)]
    if len(turned) < layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(turned)} entries, num_hidden_layers={layers}"
        )
    return [turn != 0 for turn in turned[:layers]]
