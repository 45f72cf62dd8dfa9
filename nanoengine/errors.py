"""The exceptions of nanoengine:

    NanoEngineError
    ├─ ConfigError(ValueError)        a setting of the engine; raised before any weight is read
    ├─ ModelError
    │  ├─ UnsupportedModelError       architecture or config key that nanoengine does not compute
    │  └─ WeightLoadError             missing, unexpected or mis-shaped tensors
    ├─ RequestError(ValueError)       one request; the rest of the batch is not affected
    │  └─ PromptTooLongError
    ├─ CapacityError                  this request can never fit the KV pool
    ├─ TraceError                     a file is not a trace, has another version, or is damaged
    ├─ MissingDependencyError         an optional package; names the extra to install
    └─ EngineDeadError                closed, used in a forked process, or a rank has failed
       └─ EngineHungError             a replica was killed after a timeout

A message contains what was wrong, the value, what is allowed, and what to do. `assert` is only used
for internal invariants.
Any file may import this one; it imports nothing.
"""


class NanoEngineError(Exception):
    """Base of every error that nanoengine raises on purpose."""


class ConfigError(NanoEngineError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class ModelError(NanoEngineError):
    """The checkpoint can't be run."""


class UnsupportedModelError(ModelError):
    """The architecture, or a config key that changes its computation, is not implemented."""


class WeightLoadError(ModelError):
    """Checkpoint tensors and model parameters don't match, or the files can't be read."""


class RequestError(NanoEngineError, ValueError):
    """One prompt or its sampling parameters are invalid."""


class PromptTooLongError(RequestError):
    """The prompt leaves no space for a generated token within `max_model_len`."""


class CapacityError(NanoEngineError):
    """The request needs more KV blocks than the whole pool has."""


class TraceError(NanoEngineError):
    """A file is not a trace, has another version or is damaged, or it lacks the requested data."""


class MissingDependencyError(NanoEngineError, ImportError):
    """An optional package is not installed."""


class EngineDeadError(NanoEngineError):
    """No call is possible: the engine is closed, this process was forked from one that has had an
    engine, or a rank raised or died; the message contains the reason. Without ranks, a step that
    fails raises its own error and leaves the engine usable."""


class EngineHungError(EngineDeadError):
    """A replica was killed because it sent no message for too long while rows ran."""
