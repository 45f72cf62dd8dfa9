"""The keys of a GGUF file, under the names of a config.json.

`Metadata` reads them, so that no key that would change the computation is ignored. `GGUFKeys` reads
keys that have the same meaning as in config.json, by the names in `config_reader.KEYS`. Keys with
another meaning are read by functions in the families (`Family.gguf`). This file uses only the
names of tensors.

Source: the writers and readers of such files, conversion/ and src/models/ of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanoengine.checkpoint.config_reader import KEYS, ConfigReader, Json, checked
from nanoengine.checkpoint.layer_config import FULL, SLIDING
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, repr_short, to_python

if TYPE_CHECKING:
    from nanoengine.checkpoint.gguf import GGUFTensor


class Metadata:
    """The keys of a file. Reads are recorded, so that no key that would change the computation is
    ignored."""

    def __init__(self, path: Path, raw: Json, tensors: Mapping[str, GGUFTensor]) -> None:
        self.path, self.raw, self.tensors, self._read = path, raw, tensors, set[str]()
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, of type `kind`: see `check_value`."""
        self._read.add(key)
        if key not in self.raw:
            return default
        return check_value(self.raw[key], kind, f"{self.path}: {key}", UnsupportedModelError)

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.read(f"{self.architecture}.{name}", kind, default)

    def one(self, name: str, kind: Any, default: Any = None) -> Any:
        """A number that is the same in all layers."""
        value = self.get(name, kind | list[kind], default)
        if not isinstance(value, list):
            return value
        return value[0] if len(set(value)) == 1 else self.refuse(name, "one number for all layers")

    def each(self, name: str) -> list[int]:
        """One number per layer."""
        value = self.get(name, int | list[int], 0)
        found = value if isinstance(value, list) else [value] * self.layers
        return found if len(found) == self.layers else self.refuse(name, "one number a layer")

    @property
    def layers(self) -> int:
        """The number of layers in the file, including layers for drafts."""
        found = self.get("block_count", int, 0)
        return found if 1 <= found <= 10_000 else self.refuse("block_count", "1 to 10,000")

    @property
    def main_layers(self) -> int:
        """The number of layers without those for drafts."""
        drafts, layers = self.get("nextn_predict_layers", int, 0), self.layers
        if not 0 <= drafts < layers:
            self.refuse("nextn_predict_layers", f"0 to {layers - 1}")
        return layers - drafts

    @property
    def head_dim(self) -> int:
        """The head dim of queries and keys."""
        heads, width = self.one("attention.head_count", int), self.get("embedding_length", int)
        return self.one("attention.key_length", int) or (width or 0) // (heads or 1)

    def windows(self, every: int, layers: int) -> Json:
        """Which layers have the window, and how large it is."""
        window = self.get("attention.sliding_window", int) or None
        if not every:
            return {"sliding_window": window}
        pattern = self.get("attention.sliding_window_pattern", int | list[bool | int], every)
        if not isinstance(pattern, list):
            pattern = [not pattern or (n + 1) % pattern != 0 for n in range(self.layers)]
        kinds = [SLIDING if slides and window else FULL for slides in pattern[:layers]]
        return {"sliding_window": window, "layer_types": kinds}

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raises UnsupportedModelError for the value of a key."""
        key = f"{self.architecture}.{name}"
        raise UnsupportedModelError(
            f"{self.path}: {key}={repr_short(to_python(self.raw.get(key)))} is not implemented;"
            f" supported: {supported}"
        )

    def reject_unread(self) -> None:
        """Raises UnsupportedModelError for a key of the architecture that was not read, unless it
        is harmless or has a zero value."""
        for key in self.raw.keys() - self._read:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in HARMLESS and to_python(self.raw[key]):
                self.refuse(name, "files without this key")


class GGUFKeys(ConfigReader):
    """The keys of a config whose values are in a GGUF file.

    A key that is not in `raw` has the value of the file's key that `KEYS` names. It is looked up
    when a family reads the key. Why not earlier: one key of a file has different names in the
    config.json of different families, and only the family knows which one it reads.

    Args:
        raw: the result of `gguf_models.config_json`. None is null if null is a value of the key
            (`Key.off`); else the config lacks the key, whatever the file says.
    """

    def __init__(self, file: Metadata, raw: Json, *args: Any, **kwargs: Any) -> None:
        self._file, self._found = file, {*raw}
        given = {key: raw[key] for key in raw if raw[key] is not None or KEYS[key].off}
        super().__init__(given, *args, **kwargs)

    def _find(self, key: str) -> None:
        if key in self._found or key not in KEYS or not KEYS[key].gguf:
            return
        self._found.add(key)
        if (value := self._file.one(KEYS[key].gguf, float | bool)) is not None:
            self.given |= checked({key: value}, self.where)

    def __contains__(self, key: str) -> bool:
        self._find(key)
        return super().__contains__(key)

    def get(self, key: str) -> Any:
        self._find(key)
        return super().get(key)

    def allow(self, key: str, *values: Any) -> None:
        self._find(key)
        super().allow(key, *values)

    def reject_unread(self) -> None:
        super().reject_unread()
        self._file.reject_unread()


HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"))
"""Keys of an architecture that change no result, or repeat what the tensors show."""

SCORES = {1: "softmax", 2: "sigmoid"}
"""Gating function id -> `scoring_func`."""
