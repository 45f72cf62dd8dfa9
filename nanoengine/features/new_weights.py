"""Replaces the weights of a running engine between two steps: `LLM.load_weights`.

    finish steps in flight ─ preempt running sequences ─ drop cached prefixes ─ load ─ continue

Keys and values of old weights must not be used with new ones. So running sequences are preempted:
they keep their tokens and recompute their KV cache, and no output is lost.
`runner/new_weights.py` writes the weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanoengine.checkpoint.files import INDEX_NAME
from nanoengine.core.plan import StepPlan
from nanoengine.engine import LLMEngine
from nanoengine.errors import EngineDeadError, WeightLoadError
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.new_weights import load_weights as load_into

Pairs = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def load_weights(engine: LLMEngine, weights: str | os.PathLike[str] | Pairs) -> set[str]:
    """See `LLM.load_weights`."""
    executor: Any = engine.executor
    with engine.lock.hold():
        engine.require_idle()
        cache = engine.scheduler.block_manager.prefix_cache
        if len(executor.options.config.kv_tiers) > 1:
            raise WeightLoadError(
                "a disk tier identifies its blocks by the loaded checkpoint, so new weights can't"
                " use it: remove DiskTier from kv_tiers, or create a new LLM"
            )
        source = Path(weights) if isinstance(weights, str | os.PathLike) else _by_name(weights)
        engine.finish_in_flight()
        while engine.scheduler.running:
            engine.scheduler.preempt(StepPlan(step=0), "new weights")
        is_empty = cache.reset()
        assert is_empty, "a block is still referenced, but no sequence runs"
        try:
            if isinstance(executor, ModelRunner):
                return set(load_into(executor, source))
            with tempfile.TemporaryDirectory() as folder:
                if not isinstance(source, Path):
                    source = _write_files(source, Path(folder))
                return set(executor.load_weights(source))
        except (EngineDeadError, KeyboardInterrupt):  # the model may have a part of the new weights
            engine.close()
            raise


def _by_name(pairs: Pairs) -> dict[str, torch.Tensor]:
    """Maps names to tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if not isinstance(tensor, torch.Tensor):
            raise WeightLoadError(f"new weights must be tensors, got {name}: {type(tensor)}")
        if name in found:
            raise WeightLoadError(f"new weights contain {name} twice: pass each tensor once")
        found[name] = tensor
    return found


def _write_files(tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Writes one file per tensor to the folder, from which ranks read their parts.

    Why not one file: tensors that share memory would have to be copied.
    """
    files = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name].detach().cpu().contiguous()}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return folder
