"""What the commands share: EngineConfig as a command line, and the model named `demo`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nanoengine.config import EngineConfig

DEMO = "demo"


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """The fields of EngineConfig in a command's options, as keywords of `LLM`.

    The model `demo` is the small one that comes with the package.
    """
    options = {field.name: getattr(args, field.name) for field in fields(EngineConfig)}
    if args.model == DEMO:
        from nanoengine.assets import demo_model_path

        options["model"] = str(demo_model_path())
    return options
