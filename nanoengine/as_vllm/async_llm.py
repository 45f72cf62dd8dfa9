"""vLLM's AsyncLLM: requests in one process, each an asynchronous iterator of its outputs.

The engine runs in a thread of its own, one step after the other, while there are requests. So
concurrent requests run in one batch, and the asyncio event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from nanoengine.as_vllm.llm import VLLM, reject_options
from nanoengine.errors import EngineDeadError


class VLLMAsync:
    """vLLM's AsyncLLM, and the AsyncLLMEngine of older versions."""

    def __init__(self, llm: VLLM) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._thread = ThreadPoolExecutor(1, "engine")
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._is_shut = False

    @classmethod
    def from_engine_args(cls, engine_args: Any, **options: Any) -> Self:
        """Creates an LLM and returns its engine."""
        reject_options(options)
        return cls(VLLM.from_engine_args(engine_args))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Yields the outputs of a request as it grows; closing the iterator aborts the request.

        Raises:
            RequestError: the prompt can't run, or the id is in use.
        """
        add = functools.partial(self._engine.add_request, **options)
        try:
            await self._call(add, request_id, prompt, sampling_params)
        except asyncio.CancelledError:
            if request_id not in self._outputs:  # else the id belongs to another request
                self._thread.submit(self._engine.abort_request, request_id)
            raise
        outputs = self._outputs[request_id] = asyncio.Queue[Any]()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            # Why: after a `break` in the caller's loop this runs later; then the id of a finished
            # request may belong to another one.
            if not finished and self._outputs.get(request_id, outputs) is outputs:
                self._outputs.pop(request_id, None)
                if not self._is_shut:
                    await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request without further outputs."""
        await self._call(self._engine.abort_request, request_id)

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._llm.get_tokenizer()

    async def reset_prefix_cache(self, **options: Any) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        return bool(await self._call(functools.partial(self._llm.reset_prefix_cache, **options)))

    def shutdown(self, timeout: float | None = None) -> None:
        """Frees all memory."""
        self._is_shut = True
        self._thread.shutdown()
        self._llm.close()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_shut:
            raise EngineDeadError("this AsyncLLM is shut down: create a new one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _step(self) -> None:
        """Runs steps while requests are unfinished; each request gets the exception of a step."""
        while self._outputs:
            try:
                found = [(o.request_id, o) for o in await self._call(self._engine.step)]
            except Exception as error:
                found = [(name, error) for name in self._outputs]
            for name, output in found:
                if name in self._outputs:
                    self._outputs[name].put_nowait(output)
                    # Why here: a consumer may read its last output late.
                    if isinstance(output, BaseException) or output.finished:
                        del self._outputs[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM's AsyncLLM.{name} is not supported")
