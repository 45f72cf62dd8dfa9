"""The public names and their modules, read by `__init__.py` and by type checkers."""

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
from nanoengine.runner.sampling.logits_processors import LogitsProcessor as LogitsProcessor
from nanoengine.runner.sampling.logits_processors import RowState as RowState
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
from nanoengine.version import __version__ as __version__
