"""nanoengine: two LLM inference engines, a small one to read and a large one to run.

Public names are loaded when first used (PEP 562), so `import nanoengine` costs no torch and no
transformers.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from nanoengine.version import __version__ as __version__

# Why: behind each of torch's operations its OpenMP threads spin, by default for milliseconds, on
# the cores of `kernels/pool.py`. OpenMP reads it when torch is imported; later it changes nothing.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from nanoengine.errors import CapacityError as CapacityError
    from nanoengine.errors import ConfigError as ConfigError
    from nanoengine.errors import EngineDeadError as EngineDeadError
    from nanoengine.errors import MissingDependencyError as MissingDependencyError
    from nanoengine.errors import ModelError as ModelError
    from nanoengine.errors import NanoEngineError as NanoEngineError
    from nanoengine.errors import PromptTooLongError as PromptTooLongError
    from nanoengine.errors import RequestError as RequestError
    from nanoengine.errors import UnsupportedModelError as UnsupportedModelError
    from nanoengine.errors import WeightLoadError as WeightLoadError
    from nanoengine.features.beam import BeamSearchOutput as BeamSearchOutput
    from nanoengine.features.beam import BeamSearchParams as BeamSearchParams
    from nanoengine.features.beam import BeamSequence as BeamSequence
    from nanoengine.features.pooled_outputs import (
        ClassificationRequestOutput as ClassificationRequestOutput,
    )
    from nanoengine.features.pooled_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from nanoengine.features.pooled_outputs import PoolingRequestOutput as PoolingRequestOutput
    from nanoengine.features.pooled_outputs import ScoringRequestOutput as ScoringRequestOutput
    from nanoengine.llm import LLM as LLM
    from nanoengine.outputs import CompletionOutput as CompletionOutput
    from nanoengine.outputs import Logprob as Logprob
    from nanoengine.outputs import RequestMetrics as RequestMetrics
    from nanoengine.outputs import RequestOutput as RequestOutput
    from nanoengine.runner.logits import LogitsProcessor as LogitsProcessor
    from nanoengine.runner.logits import RowState as RowState
    from nanoengine.settings.config import EngineConfig as EngineConfig
    from nanoengine.settings.params import SamplingParams as SamplingParams
    from nanoengine.settings.pooling import PoolingParams as PoolingParams
    from nanoengine.settings.structured import StructuredOutputs as StructuredOutputs
    from nanoengine.settings.structured import StructuredOutputsParams as StructuredOutputsParams
    from nanoengine.settings.tiers import DiskTier as DiskTier
    from nanoengine.settings.tiers import HostTier as HostTier
    from nanoengine.text.prompt_forms import Row as Row
    from nanoengine.text.prompt_forms import TextPrompt as TextPrompt
    from nanoengine.text.prompt_forms import TokensPrompt as TokensPrompt


_NAMES = {
    "llm": "LLM",
    "settings.config": "EngineConfig",
    "settings.tiers": "HostTier DiskTier",
    "settings.params": "SamplingParams",
    "settings.structured": "StructuredOutputs StructuredOutputsParams",
    "settings.pooling": "PoolingParams",
    "features.pooled_outputs": "ClassificationRequestOutput EmbeddingRequestOutput"
    " PoolingRequestOutput ScoringRequestOutput",
    "runner.logits": "LogitsProcessor RowState",
    "text.prompt_forms": "Row TextPrompt TokensPrompt",
    "features.beam": "BeamSearchOutput BeamSearchParams BeamSequence",
    "outputs": "CompletionOutput Logprob RequestMetrics RequestOutput",
    "errors": "CapacityError ConfigError EngineDeadError MissingDependencyError ModelError"
    " NanoEngineError PromptTooLongError RequestError UnsupportedModelError WeightLoadError",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nanoengine.{_HOME[name]}"), name)
    globals()[name] = value
    return value


# Programs written for vLLM import from these modules too; each holds the names above.
for _module in ("inputs", "sampling_params"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
