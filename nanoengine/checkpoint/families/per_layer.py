"""Which layers have a sliding window, and which apply RoPE, by the keys of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanoengine.checkpoint.keys import Keys
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV = "linear_attention", "conv"
MAMBA, ATTENTION = "mamba", "attention"
"""What transformers 4 wrote for LINEAR and FULL."""


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
    pattern: Callable[[Keys, int], bool] = lambda keys, layer: True,
    *,
    asked: bool = False,
    named: bool = True,
) -> WindowsReader:
    """No layer has one if `sliding_window` is null, else those that `layer_types` says, else those
    of a pattern.

    Args:
        pattern: whether this layer has one.
        asked: none has one unless `use_sliding_window` is set.
        named: the family has `layer_types`.
    """

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
        wanted = not asked or keys.get("use_sliding_window")
        if keys.get("sliding_window") is None or not wanted:
            return [False] * layers
        return _named(kinds) if named and kinds else [pattern(keys, n) for n in range(layers)]

    return slides


def from_max_window_layers(keys: Keys, layer: int) -> bool:
    return layer >= keys.get("max_window_layers")


def smollm_window(keys: Keys, layer: int) -> bool:
    """The layers that do not apply RoPE."""
    return not smollm_rope(keys, [False] * keys.require("num_hidden_layers"))[layer]


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


# --- which layers apply RoPE ----------------------------------------------------------------------

RopeReader = Callable[[Keys, Sequence[bool]], Sequence[float]]
"""The second argument says which layers have a window. The result has a number per layer: 0 where
it does not apply RoPE; above 1: the base of RoPE there."""


def always(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return [True] * len(slides)


def only_with_window(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return slides


def exaone_rope(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """In a model with windows, layers with full attention do not apply RoPE."""
    return slides if keys.get("sliding_window") is not None else always(keys, slides)


def nowhere(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    return [False] * len(slides)


def if_named_rope(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """Granite 4: none unless `position_embedding_type` is "rope"."""
    return [keys.get("position_embedding_type") == "rope"] * len(slides)


def layer_bases(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """Granite SWA: `layer_rope_theta` has a base per layer, 0 where it does not apply RoPE."""
    bases: Sequence[float] = keys.get("layer_rope_theta") or always(keys, slides)
    if len(bases) != len(slides) or not all(base in (0, 1) or base > 1.001 for base in bases):
        raise UnsupportedModelError(
            f"layer_rope_theta={shown(bases)} must have 0, or a number above 1.001, for each of"
            f" num_hidden_layers={len(slides)}"
        )
    return bases


def smollm_rope(keys: Keys, slides: Sequence[bool]) -> Sequence[float]:
    """`no_rope_layers` has a 0 for each layer that does not apply RoPE."""
    every, given = keys.get("no_rope_layer_interval"), keys.get("no_rope_layers")
    layers = len(slides)
    rope = given or [int((n + 1) % every != 0) for n in range(layers)]
    if len(rope) < layers:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(rope)} entries, num_hidden_layers={layers}"
        )
    return [each != 0 for each in rope[:layers]]
