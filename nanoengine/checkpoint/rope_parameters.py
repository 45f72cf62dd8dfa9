"""Checks the RoPE parameters of llama3, longrope and yarn, and computes derived ones.

`rope.py` imports it if a config has one of these types.
"""

from __future__ import annotations

import math
from typing import Any

from nanoengine.checkpoint.config_reader import ConfigReader
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import quoted


def _check_llama3(values: dict[str, Any], keys: ConfigReader) -> None:
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise UnsupportedModelError(
            f"rope type 'llama3': low_freq_factor={low} must be below high_freq_factor={high}"
        )


def _complete_longrope(values: dict[str, Any], keys: ConfigReader) -> None:
    """Source: LongRoPE (arXiv 2402.13753); `attention_factor` as in the model code of Phi-3."""
    original = values["original_max_position_embeddings"]
    factor = values.pop("factor", None) or keys.require("max_position_embeddings") / original
    stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
    values.setdefault("attention_factor", math.sqrt(1 + stretch))
    for name in ("short_factor", "long_factor"):
        values[name] = tuple(values[name])
        if not all(1e-3 <= number <= 1e6 for number in values[name]):
            raise UnsupportedModelError(
                f"rope type 'longrope' has {name}={quoted(values[name])}; supported: numbers"
                " from 0.001 to 1,000,000"
            )


def _complete_yarn(values: dict[str, Any], keys: ConfigReader) -> None:
    """Converts the temperature of the attention softmax to a factor on cos and sin.

    Source: YaRN (arXiv 2309.00071) section 3.4, equation 22; mscale and mscale_all_dim are from
    DeepSeek-V2.
    """
    growth = 0.1 * math.log(max(values["factor"], 1))
    mscale, all_dim = values.pop("mscale", None), values.pop("mscale_all_dim", None)
    values["score_factor"] = (growth * (all_dim or 0) + 1.0) ** 2
    mscale, all_dim = (mscale, all_dim) if mscale and all_dim else (1.0, 0.0)
    default = (growth * mscale + 1.0) / (growth * all_dim + 1.0)
    values["attention_factor"] = float(values.get("attention_factor", default))


COMPLETE = {"llama3": _check_llama3, "longrope": _complete_longrope, "yarn": _complete_yarn}
"""Rope type -> a function that checks its parameters and computes derived ones."""
