"""Family: what the config.json of one family means, and functions that read its fields.

A field of `LayerPlan`, `StatePlan` or `MoEConfig` is a value, or a function of the config's keys,
such as `key("mlp_bias")`. It reads only keys that the family honours; `Keys` refuses the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from nanoengine.checkpoint.families import per_layer
from nanoengine.checkpoint.keys import KEYS, Json, Keys
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig, StatePlan
from nanoengine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from nanoengine.checkpoint.gguf_keys import Metadata

T = TypeVar("T")
Reader = Callable[[Keys], T]


def key(name: str, make: Callable[[Any], Any] | None = None) -> Reader[Any]:
    """Reads a key; `make` computes the field from its value."""
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
        either = " or ".join(dict.fromkeys(names))
        raise UnsupportedModelError(
            f"config.json needs {either}, from 1 to {KEYS[names[0]].most:,}"
        )

    return read


def made(kind: Callable[..., T], fields: Mapping[str, Any], keys: Keys) -> T:
    """A plan whose fields are values or readers."""
    return kind(**{n: value(keys) if callable(value) else value for n, value in fields.items()})


def plan(only: Mapping[str, tuple[Any, ...]] | None = None, **fields: Any) -> Reader[LayerPlan]:
    """A plan of these fields; `only`: keys -> the values that are implemented."""

    def read(keys: Keys) -> LayerPlan:
        for name, values in (only or {}).items():
            keys.allow(name, *values)
        return made(LayerPlan, fields, keys)

    return read


@dataclass(frozen=True, slots=True)
class GGUFFiles:
    """What GGUF files of a family have that differs from its checkpoints.

    Attributes:
        when: whether a file is of this family, where several families have its architecture; None:
            it is, unless it is of another one.
        fixed: keys of config.json that the files leave unsaid.
        read: reads keys that say something else than a key of config.json does.
        names: parts of its tensors' names -> ours, where they differ from `gguf_tensors.NAMES`.
        pairs: rows of queries and keys are ordered for interleaved RoPE, but not in the family's
            checkpoints.
        slides: where the file has a window, all layers but each n-th have it; 0: its family knows.
        unread: keys of its metadata that change nothing of a text.
        tiled: rows of value heads of linear attention have another order: see `gguf_tensors.py`.
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
    """Whether a key of a GGUF file asks for something."""
    return lambda given: given.get(key, Any)


PLAIN, INTERMEDIATE_SIZE = plan(), size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Family:
    """What the config.json of one family means, and how its checkpoints differ from Llama's.

    Attributes:
        model_type: as config.json names it.
        normalize: its config.json -> one with the usual keys.
        plan: what its layers compute.
        states: which of them keep a recurrent state, and of what kind; None: none does.
        windows: which layers have the sliding window.
        rope_layers: which layers apply RoPE.
        bases: the keys of RoPE's base in layers with full attention, and in those with a window,
            where the two differ; None: RoPE is the same in all layers.
        moe: its mixture of experts.
        partial: whether it supports `partial_rotary_factor`; others apply RoPE to whole heads.
        defaults: values of absent keys, where they are neither those that transformers' config
            class has (`defaults.json`) nor those of `KEYS`.
        rope_extra: further keys of `rope_parameters` -> whether they change the maths of text.
        names: parts of our tensors' names -> what they are called in its checkpoints; or what reads
            this from a config.
        left_out: expression that begins the names of tensors that are for drafts.
        intermediate_size: the MLP's.
        norm_eps: the key of what norms add to a variance.
        gguf: the architectures that its GGUF files have, and what is different there.
    """

    model_type: str
    normalize: Callable[[Json], Json] | None = None
    plan: Reader[LayerPlan] = PLAIN
    states: Reader[StatePlan] | None = None
    windows: per_layer.WindowsReader = per_layer.never
    rope_layers: per_layer.RopeReader = per_layer.always
    bases: tuple[str, str] | None = None
    moe: Reader[MoEConfig | None] | None = None
    partial: bool = False
    defaults: Json = field(default_factory=dict)
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] | Reader[Mapping[str, str]] = field(default_factory=dict)
    left_out: str = ""
    intermediate_size: Reader[int] = INTERMEDIATE_SIZE
    norm_eps: str = "rms_norm_eps"
    gguf: Mapping[str, GGUFFiles] = field(default_factory=dict)
