"""What the keys of a GGUF file say, by the names of a config.json.

`Metadata` reads them, so that none is ignored that would change the maths. `GGUFKeys` reads those
that say the same as a key of config.json, by the names in `keys.KEYS`. The functions below it are
for keys that say something else, and are named in `gguf_rows.py`. Knows no tensor but by name.

Source: what writes such files and what reads them, conversion/ and src/models/ of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nanoengine.checkpoint.families.per_layer import CONV, FULL, LINEAR, SLIDING
from nanoengine.checkpoint.gguf import GGUFTensor
from nanoengine.checkpoint.keys import KEYS, Json, Keys, checked
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, plain, shown


class Metadata:
    """The keys of a file, read one by one so that none is ignored that would change the maths."""

    def __init__(self, path: Path, raw: Json, tensors: Mapping[str, GGUFTensor]) -> None:
        self.path, self.raw, self.tensors, self._read = path, raw, tensors, set[str]()
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, which is a `kind`: see `check_value`."""
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
        """A number for each layer."""
        value = self.get(name, int | list[int], 0)
        found = value if isinstance(value, list) else [value] * self.layers
        return found if len(found) == self.layers else self.refuse(name, "one number a layer")

    @property
    def layers(self) -> int:
        """How many layers the file has, those for drafts included."""
        found = self.get("block_count", int, 0)
        return found if 1 <= found <= 10_000 else self.refuse("block_count", "1 to 10,000")

    @property
    def main_layers(self) -> int:
        """How many layers there are but those."""
        drafts, layers = self.get("nextn_predict_layers", int, 0), self.layers
        if not 0 <= drafts < layers:
            self.refuse("nextn_predict_layers", f"0 to {layers - 1}")
        return layers - drafts

    @property
    def head_dim(self) -> int:
        """The size of a query's and a key's head."""
        heads, width = self.one("attention.head_count", int), self.get("embedding_length", int)
        return self.one("attention.key_length", int) or (width or 0) // (heads or 1)

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raises UnsupportedModelError for what a key says."""
        key = f"{self.architecture}.{name}"
        raise UnsupportedModelError(
            f"{self.path}: {key}={shown(plain(self.raw.get(key)))} is not implemented; supported:"
            f" {supported}"
        )

    def refuse_others(self) -> None:
        """Raises UnsupportedModelError for a key of the architecture that nobody has read, unless
        it is harmless, or asks for nothing."""
        for key in self.raw.keys() - self._read:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in HARMLESS and plain(self.raw[key]):
                self.refuse(name, "files without this key")


class GGUFKeys(Keys):
    """The keys of a config whose values are in a GGUF file.

    A key that `raw` lacks has the value that the file has by the name in `KEYS`. It is looked up
    where a family reads the key. Why not before: one key of a file has other names in the
    config.json of other families, and only the family knows which of them it reads.

    Args:
        raw: what `gguf_models.config_json` has found. None is null where null is a value of the key
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

    def refuse_others(self) -> None:
        super().refuse_others()
        self._file.refuse_others()


HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"))
"""Keys of an architecture that change no result, or say what the tensors show."""


# fmt: off
SCORES = {1: "softmax", 2: "sigmoid"}
"""What router logits become, by its number."""


def expert_size(given: Metadata) -> Json:
    """For families whose config.json has the size of experts as that of an MLP."""
    return {"intermediate_size": given.one("expert_feed_forward_length", int)}


def gemma(given: Metadata) -> Json:
    """By what scores are scaled: a head's size, but in the largest models, which their number of
    layers shows, the hidden size a head."""
    heads, width = given.one("attention.head_count", int, 1), given.get("embedding_length", int, 0)
    wide = given.layers in (46, 62)
    return {"query_pre_attn_scalar": width // max(1, heads) if wide else given.head_dim}


def lfm2(given: Metadata, without: str = CONV) -> Json:
    """Layers without keys are convolutions."""
    heads = given.each("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if count else without for count in heads],
    }


def delta(given: Metadata) -> Json:
    """Which layers have linear attention, and the sizes of its heads."""
    every, layers = given.get("full_attention_interval", int, 4) or 1, given.layers
    kinds = given.get("attention.recurrent_layers", list[bool])
    kinds = kinds or [(n + 1) % every != 0 for n in range(layers)]
    heads, inner = given.get("ssm.time_step_rank", int), given.get("ssm.inner_size", int, 0)
    return {
        "layer_types": [LINEAR if linear else FULL for linear in kinds[: given.main_layers]],
        "linear_num_value_heads": heads, "linear_value_head_dim": inner // (heads or 1),
    }


def normed(given: Metadata) -> Json:
    """For families that always divide the weights of a token's experts by their sum."""
    if not given.get("expert_weights_norm", bool, True):
        given.refuse("expert_weights_norm", "True")
    return {}


def mamba(given: Metadata) -> Json:
    """The sizes of Mamba's heads."""
    heads, inner = given.get("ssm.time_step_rank", int, 0), given.get("ssm.inner_size", int, 0)
    return {"mamba_n_heads": heads, "mamba_d_head": inner // (heads or 1), "mamba_d_ssm": inner}


def granite_hybrid(given: Metadata) -> Json:
    """Layers without keys are Mamba's."""
    found = {**lfm2(given, LINEAR), **mamba(given)}
    turned, count = given.get("rope.scaling.finetuned", bool), given.get("expert_count", int, 0)
    if turned is None:
        given.refuse("rope.scaling.finetuned", "a key that says whether heads are turned")
    if turned:
        return found
    none = {} if count else dict.fromkeys(("intermediate_size", "num_experts_per_tok"))
    return found | none | {"num_local_experts": count}


def nemotron(given: Metadata) -> Json:
    """A layer is one thing: attention has keys, an MLP or experts have an inner size."""
    keys, inner = given.each("attention.head_count_kv"), given.each("feed_forward_length")
    dense, sizes = given.architecture == "nemotron_h", mamba(given)
    # Why: writers name experts of such files too, of which there are none.
    none = [key for key in KEYS if dense and KEYS[key].gguf.startswith("expert_")]
    for key in none:
        given.get(KEYS[key].gguf, Any)
    mlp = "mlp" if dense else "moe"
    both = list(zip(keys, inner, strict=True))[: given.main_layers]
    return {
        "layers_block_type": [FULL if kv else mlp if size else LINEAR for kv, size in both],
        "num_key_value_heads": max(keys), "intermediate_size": max(inner) or None,
        "mamba_num_heads": sizes["mamba_n_heads"], "mamba_head_dim": sizes["mamba_d_head"],
        **dict.fromkeys(none),
    }


def latent(given: Metadata) -> Json:
    """The sizes of attention over latents. Files without those of MLA name them as of plain
    heads."""
    turned = given.get("rope.dimension_count", int, 0)
    key = given.get("attention.key_length_mla", int) or given.head_dim
    # Why read: it is one, or as many as there are heads, by the writer.
    given.get("attention.head_count_kv", Any)
    value = given.get("attention.value_length_mla", int)
    value = value or given.one("attention.value_length", int)
    return {
        "q_lora_rank": given.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned, "v_head_dim": value,
        "num_key_value_heads": given.get("attention.head_count", int), "head_dim": max(2, turned),
    }


def deepseek(given: Metadata) -> Json:
    """The same, and experts as llama.cpp has them where keys are absent; what has none names some
    sizes nevertheless."""
    groups, name = given.get("expert_group_count", int) or 1, deepseek_name(given)
    found = {
        "n_group": groups, "topk_group": given.get("expert_group_used_count", int) or 1,
        "norm_topk_prob": given.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": given.get("expert_weights_scale", float) or 1.0,
        "first_k_dense_replace": given.get("leading_dense_block_count", int, 0),
        "n_shared_experts": given.get("expert_shared_count", int, 0),
        "moe_intermediate_size": given.get("expert_feed_forward_length", int),
    }
    if name == "YoutuForCausalLM":
        found = dict.fromkeys(found)
    elif name is None and groups > 1:
        found["topk_method"] = "group_limited_greedy"
    elif name is None:
        found |= {"n_group": None, "topk_group": None}
    return found | latent(given)


def deepseek_name(given: Metadata) -> str | None:
    """Which of the families of this architecture. Why the second: first files of GLM-4.7-Flash name
    no scores, and only sigmoids have such a bias."""
    if not given.get("expert_count", int):
        return "YoutuForCausalLM"
    biased = any(name.endswith(".exp_probs_b.bias") for name in given.tensors)
    sigmoid = SCORES.get(given.get("expert_gating_func", int, 2 if biased else 1)) == "sigmoid"
    return "DeepseekV3ForCausalLM" if sigmoid else None


def gemma4(given: Metadata) -> Json:
    """What differs in layers that see everything, and which last layers have no keys."""
    kinds = windows(given, 6, given.layers)["layer_types"]
    heads, inner = given.each("attention.head_count_kv"), given.each("feed_forward_length")
    by_kind = dict(zip(kinds, heads, strict=False))
    window = given.get("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if given.get(name, int, window) != window:
            given.refuse(name, f"{window}, the size of keys")
    other = {"head_dim": given.head_dim, "num_key_value_heads": by_kind.get(FULL, 0)}
    full = [n for n, kind in enumerate(kinds) if kind == FULL]
    return {
        "head_dim": window, "num_key_value_heads": by_kind.get(SLIDING, heads[0]),
        "per_layer_config": {str(n): other for n in full},
        "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] > inner[0],
        "attention_k_eq_v": f"blk.{min(full, default=0)}.attn_v.weight" not in given.tensors,
        "enable_moe_block": bool(given.get("expert_count", int)),
        "top_k_experts": given.get("expert_used_count", int), "num_experts_per_tok": None,
    }


def hunyuan_3(given: Metadata) -> Json:
    """How many experts are shared, by their size; layers without a router are dense."""
    size = given.get("expert_feed_forward_length", int) or 1
    routers = [f"blk.{n}.ffn_gate_inp.weight" in given.tensors for n in range(given.main_layers)]
    return normed(given) | {
        "num_shared_experts": given.get("expert_shared_feed_forward_length", int, 0) // size,
        "first_k_dense_replace": routers.index(True) if True in routers else len(routers),
    }
# fmt: on


def windows(given: Metadata, every: int, layers: int) -> Json:
    """Which layers have the window, and how large it is."""
    window = given.get("attention.sliding_window", int) or None
    if not every:
        return {"sliding_window": window}
    pattern = given.get("attention.sliding_window_pattern", int | list[bool | int], every)
    if not isinstance(pattern, list):
        pattern = [not pattern or (n + 1) % pattern != 0 for n in range(given.layers)]
    kinds = [SLIDING if slides and window else FULL for slides in pattern[:layers]]
    return {"sliding_window": window, "layer_types": kinds}
