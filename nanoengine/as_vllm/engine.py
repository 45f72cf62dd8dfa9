"""vLLM's LLMEngine and ModelConfig: views of an LLM that programs step, or look into.

The engine's requests are one call on the LLM, so any other call cuts them off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from nanoengine.as_vllm import absent
from nanoengine.as_vllm.llm import VLLM, obeyed
from nanoengine.as_vllm.outputs import VLLMOutput, request_output
from nanoengine.as_vllm.params import VLLMParams, ours
from nanoengine.checkpoint.find import resolve_model
from nanoengine.errors import RequestError
from nanoengine.llm_calls import check_lora
from nanoengine.outputs import OutputBuilder, OutputKind
from nanoengine.turns import Call

KINDS: dict[str, OutputKind] = {"CUMULATIVE": "cumulative", "DELTA": "delta", "FINAL_ONLY": "final"}


class VLLMEngine:
    """vLLM's LLMEngine: requests in, a step at a time, outputs of what has grown."""

    def __init__(self, llm: VLLM) -> None:
        self._llm = llm
        self._call: Call[Any] | None = None
        self._running: dict[str, tuple[str, OutputBuilder, OutputKind]] = {}
        self.model_config = ModelView(llm)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **options: Any) -> Any:
        """The engine of a new LLM."""
        obeyed(options)
        return VLLM.from_engine_args(engine_args).llm_engine

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: VLLMParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> str:
        """Queues a request under the caller's name for it."""
        check_lora(lora_request)
        obeyed(options)
        if any(name == request_id for name, *_ in self._running.values()):
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        llm = self._llm
        (read,) = llm.open_reader().read_all([prompt], [ours(params)], priority, "raise")
        if self._call is None or llm._calls.latest is not self._call:
            self._call, self._running = llm._calls.begin(), {}
        kind = KINDS[params.output_kind.name]
        with self._call.turn() as engine:
            builder = llm._queue(engine, read, kind)  # type: ignore[arg-type]
        self._running[builder.request.request_id] = request_id, builder, kind
        return request_id

    def step(self) -> list[VLLMOutput]:
        """Runs a step; the outputs of what has ended or grown by it."""
        if self._call is None:
            return []
        with self._call.turn():
            shown = [self._running.pop(one) for one in self._call.step(self._running)]
            for name, builder, kind in self._running.values():
                if kind != "final" and builder.has_grown():
                    shown.append((name, builder, kind))
            return [request_output(one.build(), request_id=name) for name, one, _ in shown]

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Requests that are queued or run."""
        return len(self._running)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; nothing more is heard of them."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        for key in [key for key, (name, *_) in self._running.items() if name in names]:
            self._llm.engine.abort(key)
            del self._running[key]

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self._llm.get_tokenizer()

    def reset_prefix_cache(self, **options: Any) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return self._llm.reset_prefix_cache(**options)

    @property
    def model_executor(self) -> Any:
        """Nothing to look into; deleting it gives the memory back."""
        return absent("model_executor", "llm.engine.executor.model is the model")

    @model_executor.deleter
    def model_executor(self) -> None:
        self._llm.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nanoengine does not offer vLLM's llm_engine.{name}: see llm.engine")


class ModelView:
    """What programs read of vLLM's ModelConfig."""

    is_multimodal_model, runner_type = False, "generate"

    def __init__(self, llm: VLLM) -> None:
        self._info, self._config = llm.info, llm.config
        self.model, self.max_model_len = llm.config.model, llm.info.max_model_len
        self.tokenizer = llm.config.tokenizer or llm.config.model
        self.trust_remote_code, self.seed = llm.config.trust_remote_code, llm.config.seed

    @property
    def dtype(self) -> Any:
        """The torch.dtype that the model computes in."""
        import torch

        return getattr(torch, self._info.dtype)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The configuration as transformers reads it."""
        from transformers import AutoConfig

        trust = self.trust_remote_code
        return AutoConfig.from_pretrained(resolve_model(self._config), trust_remote_code=trust)

    def get_vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self._info.vocab_size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nanoengine does not offer vLLM's model_config.{name}: see llm.info")
