"""LogitsProcessors: logits processors for functions and grammars, created when a row needs one.

    the caller's functions and processors (custom_processors.py) ─ grammars (structured.py)

Created by `build.py`, called by a runner's `ensure_step_sampler`; each rank creates its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.errors import RequestError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams

if TYPE_CHECKING:
    from nanoengine.features.structured import Structured
    from nanoengine.runner.sampling.logits_processors import LogitsProcessor


class LogitsProcessors:
    """The logits processors for a model.

    Raises:
        ConfigError: one of the LLM's logits_processors is a class.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self._args = (config, model_config)
        if config.logits_processors:
            _ = self._custom

    def __call__(self) -> tuple[LogitsProcessor, ...]:
        """All of them, in the order of their edits."""
        return (*self._custom, self.structured)

    def __reduce__(self) -> tuple[type[LogitsProcessors], tuple[object, ...]]:
        return LogitsProcessors, self._args

    @functools.cached_property
    def _custom(self) -> tuple[LogitsProcessor, ...]:
        from nanoengine.features.custom_processors import make_processors

        return make_processors(self._args[0].logits_processors)

    @functools.cached_property
    def structured(self) -> Structured:
        """The logits processor of grammars, which compiles each grammar once."""
        from nanoengine.features.structured import make_structured

        return make_structured(*self._args)

    def check(self, params: SamplingParams) -> None:
        """Called for a request whose parameters contain token ids or logits processors.

        Raises:
            RequestError: a grammar can't be compiled, or a value can't be sent to ranks.
        """
        if params.structured_outputs is not None:
            self.structured.check(params)
        if self._args[0].tensor_parallel_size > 1 and (
            params.logits_processors or params.extra_args
        ):
            from nanoengine.ranks.executor import require_sendable

            sent = (params.logits_processors, params.extra_args)
            require_sendable("logits_processors and extra_args", sent, RequestError)

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether `check` need not wait for a grammar; if False, its compilation has started."""
        return params.structured_outputs is None or self.structured.is_ready(params)
