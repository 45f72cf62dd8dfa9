"""A replica with a scripted LLM instead of a model: an output depends only on its row.

    this module in place of `parallel/replica.py`

It does not import torch, so a process starts quickly.

A prompt is a string: "die" ends the process by SIGKILL while the row runs, "hang" stops it, "raise"
makes the stream raise. Any other prompt is answered with itself and its key, `SLOW_S` after the
step that admitted it.

`tokenizer`: "refuse" makes loading fail. With "DIE_AT_START=PATH" the process dies once per line in
that file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from nanoengine.core.engine_stats import EngineInfo, EngineStats
from nanoengine.errors import ConfigError
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.parallel import replica
from nanoengine.text.prompt_forms import PAUSE

SLOW_S = 0.002
AT_ONCE = 4


class ScriptedLLM:
    """The part of an LLM that a replica uses."""

    def __init__(self, tokenizer: str | None = None, **options: Any) -> None:
        if tokenizer == "refuse":
            raise ConfigError("the script refuses")
        if tokenizer is not None and tokenizer.startswith("DIE_AT_START="):
            file = Path(tokenizer.partition("=")[2])
            first, *others = [*file.read_text().splitlines(), None]
            file.write_text("".join(f"{line}\n" for line in others[:-1]))
            if first is not None:
                os.kill(os.getpid(), signal.SIGKILL)
        self.engine = SimpleNamespace(observers=[])
        self.info = EngineInfo(
            **dict.fromkeys(EngineInfo.__dataclass_fields__, 0)  # type: ignore[arg-type]
        )
        self._answered = 0

    def stats(self) -> EngineStats:
        numbers: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        numbers |= {"output_tokens": self._answered, "cache_misses": {}, "tiers": ()}
        return EngineStats(**numbers)

    def stream(self, rows: Iterator[Any], on_error: str) -> Iterator[RequestOutput]:
        running: list[tuple[int, Any]] = []
        index, has_more = 0, True
        while has_more or running:
            while has_more and len(running) < AT_ONCE:
                row = next(rows, None)
                if row is PAUSE:
                    break
                has_more = row is not None
                if row is not None:
                    running.append((index, row))
                    index += 1
            time.sleep(SLOW_S)
            for _, row in running:
                if row.prompt == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if row.prompt == "hang":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if row.prompt == "raise":
                    raise ValueError("the script raises")
            for observer in self.engine.observers:
                observer.on_step(None, None, None)
            if running:
                number, row = running.pop(0)
                self._answered += 1
                yield answer(number, row)


def answer(index: int, row: Any) -> RequestOutput:
    """The output of a row."""
    text = f"{row.prompt} {row.key}"
    completion = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason="stop")
    return RequestOutput(
        request_id=str(index),
        index=index,
        prompt=row.prompt,
        prompt_token_ids=[1],
        outputs=[completion],
        finished=True,
    )


def main(connection: Connection, *cores: int) -> None:
    llm = ModuleType("nanoengine.llm")
    llm.LLM = ScriptedLLM  # type: ignore[attr-defined]
    sys.modules[llm.__name__] = llm
    replica.STATS_S = 0.0
    replica.main(connection, *cores)
