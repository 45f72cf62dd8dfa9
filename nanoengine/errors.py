"""The exception tree: every error a user can meet, in one picture.

    NanoEngineError
    ├─ ConfigError(ValueError)        a setting of the engine; raised before any weight is read
    ├─ ModelError
    │  ├─ UnsupportedModelError       architecture or config key that nanoengine does not compute
    │  └─ WeightLoadError             missing, unexpected or mis-shaped tensors, by name
    ├─ RequestError(ValueError)       one request; it never takes the batch down
    │  └─ PromptTooLongError
    ├─ CapacityError                  this request can never fit the KV pool
    ├─ TraceError                     a file that is no trace, of another version, or damaged
    ├─ MissingDependencyError         an optional package; names the extra to install
    └─ EngineDeadError                closed, used in a forked process, or a rank has failed
       └─ EngineHungError             a replica that has said nothing for long, and was killed

A message says what was wrong, the value, what is allowed, and what to do. `assert` stays for
internal invariants.
Everyone may import this file; it imports nothing.
"""


class NanoEngineError(Exception):
    """Base of every error that nanoengine raises on purpose."""


class ConfigError(NanoEngineError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class ModelError(NanoEngineError):
    """The checkpoint can't be run."""


class UnsupportedModelError(ModelError):
    """The architecture, or a config key that changes its maths, is not implemented."""


class WeightLoadError(ModelError):
    """Checkpoint tensors and model parameters don't match, or the files can't be read."""


class RequestError(NanoEngineError, ValueError):
    """One prompt or its sampling parameters are invalid."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single generated token within `max_model_len`."""


class CapacityError(NanoEngineError):
    """The request needs more KV blocks than the whole pool has."""


class TraceError(NanoEngineError):
    """A file is no trace, one of another version, or damaged; or it has not what was asked for."""


class MissingDependencyError(NanoEngineError, ImportError):
    """An optional package is not installed."""


class EngineDeadError(NanoEngineError):
    """No call is possible: the engine is closed, this process was forked from one that has had an
    engine, or a rank raised or died, which the message tells. Without ranks a step that fails
    raises its own error and leaves the engine usable."""


class EngineHungError(EngineDeadError):
    """A replica has said nothing for so long while rows ran that it was killed."""
