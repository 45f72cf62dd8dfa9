"""Metadata: the keys of a GGUF file. GGUFConfigReader: reads them by the names in config.json.

Keys that have the same meaning as in config.json are read by GGUFConfigReader: `SCHEMA` has both
names. Keys with another meaning are read by functions of the families (`Family.gguf`). A key that
changes the computation and is not read raises an error. This file reads only the names of tensors.

Source: the writers and readers of such files, conversion/ and src/models/ of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader, Json, check_values
from nanoengine.checkpoint.layer_config import FULL, SLIDING
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, quoted, to_python

if TYPE_CHECKING:
    from nanoengine.checkpoint.gguf import GGUFTensor


class Metadata:
    """The keys of a GGUF file. Reads are recorded, to reject keys of the architecture that are not
    read."""

    def __init__(self, path: Path, raw: Json, tensors: Mapping[str, GGUFTensor]) -> None:
        self.path, self.raw, self.tensors, self._read = path, raw, tensors, set[str]()
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, which must have the type `kind` (see `check_value`)."""
        self._read.add(key)
        if key not in self.raw:
            return default
        return check_value(self.raw[key], kind, f"{self.path}: {key}", UnsupportedModelError)

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """The value of a key with the architecture prefix."""
        return self.read(f"{self.architecture}.{name}", kind, default)

    def uniform(self, name: str, kind: Any, default: Any = None) -> Any:
        """The value of a key that must be the same in all layers."""
        value = self.get(name, kind | list[kind], default)
        if not isinstance(value, list):
            return value
        return value[0] if len(set(value)) == 1 else self.reject(name, "the same in all layers")

    def per_layer(self, name: str) -> list[int]:
        """The value of a key for each layer; a single number applies to all layers."""
        value = self.get(name, int | list[int], 0)
        found = value if isinstance(value, list) else [value] * self.num_layers
        return found if len(found) == self.num_layers else self.reject(name, "one number per layer")

    @property
    def num_layers(self) -> int:
        """The number of layers in the file, including MTP layers."""
        found = self.get("block_count", int, 0)
        return found if 1 <= found <= 10_000 else self.reject("block_count", "1 to 10,000")

    @property
    def num_main_layers(self) -> int:
        """The number of layers without the MTP layers."""
        mtp_layers, layers = self.get("nextn_predict_layers", int, 0), self.num_layers
        if not 0 <= mtp_layers < layers:
            self.reject("nextn_predict_layers", f"0 to {layers - 1}")
        return layers - mtp_layers

    @property
    def head_dim(self) -> int:
        """The head dim of queries and keys."""
        if size := self.uniform("attention.key_length", int):
            return size
        heads, width = self.uniform("attention.head_count", int), self.get("embedding_length", int)
        return (width or 0) // (heads or 1)

    def window_keys(self, every: int, layers: int) -> Json:
        """`sliding_window` and `layer_types` of config.json.

        Args:
            every: n: if the file has no list, every n-th layer has full attention; 0: `layer_types`
                is not set.
        """
        window = self.get("attention.sliding_window", int) or None
        if not every:
            return {"sliding_window": window}
        pattern = self.get("attention.sliding_window_pattern", int | list[bool | int], every)
        if not isinstance(pattern, list):
            pattern = [not pattern or (n + 1) % pattern != 0 for n in range(self.num_layers)]
        kinds = [SLIDING if slides and window else FULL for slides in pattern[:layers]]
        return {"sliding_window": window, "layer_types": kinds}

    def reject(self, name: str, supported: str) -> NoReturn:
        """Raises UnsupportedModelError because the value of a key is not supported."""
        key = f"{self.architecture}.{name}"
        raise UnsupportedModelError(
            f"{self.path}: {key}={quoted(to_python(self.raw.get(key)))} is not implemented;"
            f" supported: {supported}"
        )

    def reject_unread(self) -> None:
        """Raises UnsupportedModelError for a key of the architecture that was not read, unless it
        is harmless, or its value is 0, False or empty."""
        for key in self.raw.keys() - self._read:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in HARMLESS and to_python(self.raw[key]):
                self.reject(name, "files without this key")


class GGUFConfigReader(ConfigReader):
    """Reads the keys of a config.json from the metadata of a GGUF file.

    A key that is not in `raw` has the value of the metadata key in `SCHEMA`. It is looked up when a
    family reads it. Why not earlier: one metadata key may have different names in the config.json
    of different families, and each family reads only its own name.

    Args:
        raw: the result of `gguf_models.config_json`. A value of None means null if the key is
            `nullable`; otherwise the key is absent, even if the metadata have it.
    """

    def __init__(self, metadata: Metadata, raw: Json, *args: Any, **kwargs: Any) -> None:
        self._metadata, self._found = metadata, {*raw}
        known = {key: raw[key] for key in raw if raw[key] is not None or SCHEMA[key].nullable}
        super().__init__(known, *args, **kwargs)

    def _look_up(self, key: str) -> None:
        if key in self._found or key not in SCHEMA or not SCHEMA[key].gguf:
            return
        self._found.add(key)
        if (value := self._metadata.uniform(SCHEMA[key].gguf, float | bool)) is not None:
            self.raw |= check_values({key: value}, self.where)

    def __contains__(self, key: str) -> bool:
        self._look_up(key)
        return super().__contains__(key)

    def get(self, key: str) -> Any:
        self._look_up(key)
        return super().get(key)

    def require_one_of(self, key: str, *values: Any) -> None:
        self._look_up(key)
        super().require_one_of(key, *values)

    def reject_unread(self) -> None:
        super().reject_unread()
        self._metadata.reject_unread()


HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"))
"""Keys of an architecture that have no effect, or repeat what the shapes of tensors show."""

SCORING_FUNCS = {1: "softmax", 2: "sigmoid"}
"""Value of expert_gating_func -> `scoring_func` of config.json."""
