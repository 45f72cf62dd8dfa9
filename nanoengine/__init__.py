"""nanoengine: two LLM inference engines, a small one to read and a large one to run.

Public names are loaded when first used (PEP 562), so `import nanoengine` costs no torch and no
transformers.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from nanoengine.version import __version__ as __version__

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
    from nanoengine.llm import LLM as LLM
    from nanoengine.outputs import CompletionOutput as CompletionOutput
    from nanoengine.outputs import Logprob as Logprob
    from nanoengine.outputs import RequestMetrics as RequestMetrics
    from nanoengine.outputs import RequestOutput as RequestOutput
    from nanoengine.runner.logits import LogitsProcessor as LogitsProcessor
    from nanoengine.runner.logits import RowState as RowState
    from nanoengine.settings.config import EngineConfig as EngineConfig
    from nanoengine.settings.params import SamplingParams as SamplingParams
    from nanoengine.settings.structured import StructuredOutputs as StructuredOutputs
    from nanoengine.settings.structured import StructuredOutputsParams as StructuredOutputsParams
    from nanoengine.settings.tiers import DiskTier as DiskTier
    from nanoengine.settings.tiers import HostTier as HostTier
    from nanoengine.text.prompt_forms import Row as Row
    from nanoengine.text.prompt_forms import TextPrompt as TextPrompt
    from nanoengine.text.prompt_forms import TokensPrompt as TokensPrompt


_HOME = {
    "LLM": "llm",
    "EngineConfig": "settings.config",
    "HostTier": "settings.tiers",
    "DiskTier": "settings.tiers",
    "SamplingParams": "settings.params",
    "StructuredOutputs": "settings.structured",
    "StructuredOutputsParams": "settings.structured",
    "LogitsProcessor": "runner.logits",
    "RowState": "runner.logits",
    "Row": "text.prompt_forms",
    "TextPrompt": "text.prompt_forms",
    "TokensPrompt": "text.prompt_forms",
    "BeamSearchOutput": "features.beam",
    "BeamSearchParams": "features.beam",
    "BeamSequence": "features.beam",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "CapacityError": "errors",
    "ConfigError": "errors",
    "EngineDeadError": "errors",
    "MissingDependencyError": "errors",
    "ModelError": "errors",
    "NanoEngineError": "errors",
    "PromptTooLongError": "errors",
    "RequestError": "errors",
    "UnsupportedModelError": "errors",
    "WeightLoadError": "errors",
}

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
