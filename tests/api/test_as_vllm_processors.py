"""vLLM's logits processors and the row indices that they receive, and AsyncLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.as_vllm.async_llm import VLLMAsync
from nanoengine.as_vllm.engine_args import EngineArgs
from nanoengine.as_vllm.llm import VLLM
from nanoengine.as_vllm.params import RequestOutputKind, VLLMParams
from nanoengine.as_vllm.processors import (
    AdapterLogitsProcessor,
    BatchedProcessor,
    BatchUpdate,
    MoveDirectionality,
    VLLMProcessor,
    process_dict_updates,
)
from nanoengine.assets import demo_model_path
from nanoengine.errors import EngineDeadError, NanoEngineError, RequestError
from nanoengine.features.custom_processors import TokenIds

MODEL = str(demo_model_path())
PROMPTS = ["Once upon a time", "The little dog", "A red bird", "Tom", "The old cat", "One day"]


class Recorder(VLLMProcessor):
    """Records the output ids per row index, with `process_dict_updates`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.size, self.changes = 0, 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.size, self.changes = batch_update.batch_size, self.changes + 1
            used = self.outputs.keys() - set(batch_update.removed)
            used |= {index for index, *_ in batch_update.added}
            for start, end, direction in batch_update.moved:
                assert start in used
                assert (end in used) == (direction is MoveDirectionality.SWAP)
                used = used | {end} if end in used else used - {start} | {end}
        process_dict_updates(self.outputs, batch_update, lambda params, prompt, output: output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@given(st.lists(st.lists(st.integers(0, 7), unique=True, min_size=1), max_size=12))
@settings(max_examples=80, deadline=None)
def test_indices_equal_those_of_the_rows(steps: list[list[int]]) -> None:
    recorder = Recorder(None, torch.device("cpu"), False)
    stage = BatchedProcessor(recorder)
    requests = [TokenIds(None, [], [n]) for n in range(8)]
    before: list[int] = []
    for step in steps:
        states = [requests[n] for n in step]
        changes = recorder.changes
        stage.apply(torch.zeros(len(step), 2), range(len(step)), states)
        assert recorder.outputs == {i: one.output for i, one in enumerate(states)}
        assert recorder.size == len(step)
        assert (recorder.changes == changes) == (step == before)
        before = step
    for n, request in enumerate(requests):
        request.accept(9)
        assert request.output == [n, 9]
        assert all(recorder.outputs[i] is requests[m].output for i, m in enumerate(before))


class Odd(Recorder):
    """Keeps one logit per row with `extra_args`; which depends on the number of output tokens."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        if (sampling_params.extra_args or {}).get("step", 0) > 99:
            raise ValueError("step is too large")

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.outputs,
            batch_update,
            lambda p, _, out: p.extra_args and (p.extra_args["step"], out),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (step, output) in self.outputs.items():
            keep = 5 + step * (len(output) + 1)
            value = logits[index, keep].clone()
            logits[index] = float("-inf")
            logits[index, keep] = value
        return logits


class Adapted(AdapterLogitsProcessor):
    """The same edit with one function per request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        if not params.extra_args:
            return None
        step = params.extra_args["step"]

        def with_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert prompt
            return plain(output, logits)

        def plain(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            edited = torch.full_like(logits, float("-inf"))
            edited[5 + step * (len(output) + 1)] = 1.0
            return edited

        return with_prompt if step % 2 else plain


def make(*processors: Any) -> VLLM:
    return VLLM(MODEL, num_gpu_blocks_override=64, max_num_seqs=3, logits_processors=processors)


@pytest.mark.parametrize("processor", [Odd, Adapted, f"{__name__}:Odd"])
def test_a_class_edits_the_requests_that_use_it(processor: Any) -> None:
    """There are more requests than slots; some end early, some use no processor, some use two."""
    params = [
        VLLMParams(
            temperature=1 if i == 2 else 0,
            n=2 if i == 2 else 1,
            max_tokens=3 + i,
            ignore_eos=True,
            extra_args={"step": i} if i % 3 else None,
        )
        for i in range(len(PROMPTS))
    ]
    with VLLM(MODEL, num_gpu_blocks_override=64) as llm:
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
    with make(processor) as llm:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
    for i, (output, expected) in enumerate(zip(found, plain, strict=True)):
        forced = [5 + i * (n + 1) for n in range(3 + i)]
        for one, other in zip(output.outputs, expected.outputs, strict=True):
            assert one.token_ids == (forced if i % 3 else other.token_ids)


def test_a_request_rejected_by_a_class_fails_alone() -> None:
    wrong = VLLMParams(max_tokens=2, extra_args={"step": 100})
    with make(Odd) as llm, pytest.warns(UserWarning, match="1 of 2 requests failed"):
        good, bad = llm.generate(["a", "b"], [VLLMParams(max_tokens=2), wrong], use_tqdm=False)
    assert good.outputs[0].error is None and "step is too large" in bad.outputs[0].error


# --- AsyncLLM -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMAsync]:
    args = EngineArgs(model=MODEL, num_gpu_blocks_override=64, max_num_seqs=4)
    engine = VLLMAsync.from_engine_args(args)
    yield engine
    engine.shutdown()


async def collect(engine: VLLMAsync, prompt: str, params: VLLMParams, name: str) -> list[Any]:
    return [one async for one in engine.generate(prompt, params, request_id=name)]


def test_concurrent_requests_give_the_outputs_of_a_call(engine: VLLMAsync) -> None:
    kinds = RequestOutputKind
    params = VLLMParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def run() -> list[list[Any]]:
        calls = []
        for i, prompt in enumerate(PROMPTS):
            own = params.clone()
            own.output_kind = (kinds.DELTA, kinds.CUMULATIVE, kinds.FINAL_ONLY)[i % 3]
            calls.append(collect(engine, prompt, own, f"r{i}"))
        return list(await asyncio.gather(*calls))

    found = asyncio.run(run())
    expected = engine._llm.generate(PROMPTS, params, use_tqdm=False)
    for i, (outputs, whole) in enumerate(zip(found, expected, strict=True)):
        texts = [one.outputs[0].text for one in outputs]
        assert outputs[-1].finished and outputs[-1].request_id == f"r{i}"
        assert ("".join(texts) if i % 3 == 0 else texts[-1]) == whole.outputs[0].text
        assert len(outputs) > 2 or i % 3 == 2


def test_closing_an_iterator_aborts_its_request(engine: VLLMAsync) -> None:
    long = VLLMParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def run() -> None:
        outputs = engine.generate("Once", long, "left")
        async for _ in outputs:
            break
        with pytest.raises(RequestError, match="in use"):
            await collect(engine, "Once", long, "left")
        await outputs.aclose()
        assert not engine._engine.has_unfinished_requests()
        assert (await collect(engine, "Once", VLLMParams(max_tokens=1), "left"))[-1].finished

    asyncio.run(run())


def test_an_exception_of_a_step_reaches_all_waiting_requests(
    engine: VLLMAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._engine, "step", step)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(collect(engine, "Once", VLLMParams(max_tokens=3), "x"))
    with pytest.raises(AttributeError, match=r"AsyncLLM\.encode"):
        engine.encode("Once")


LONG = VLLMParams(temperature=0, max_tokens=400, ignore_eos=True)


def test_steps_end_although_a_consumer_is_slow(engine: VLLMAsync) -> None:
    """Regression: an idle engine was stepped forever, and each step's error was kept."""

    async def run() -> None:
        slow = engine.generate("Once", VLLMParams(max_tokens=1), "slow")
        assert (await anext(slow)).finished
        assert engine._stepping is not None
        await asyncio.wait_for(engine._stepping, 20)
        cut = engine.generate("Once", LONG, "cut")
        await anext(cut)
        engine._llm.generate("Tom", VLLMParams(max_tokens=1), use_tqdm=False)
        await asyncio.wait_for(engine._stepping, 20)
        with pytest.raises(NanoEngineError, match="ended by another call"):
            _ = [one async for one in cut]
        again = await collect(engine, "Once", VLLMParams(max_tokens=1), "slow")
        assert again[-1].finished
        await slow.aclose()

    asyncio.run(run())


def test_cancelling_while_a_request_is_added_leaves_no_request(
    engine: VLLMAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled, add = threading.Event(), threading.Event(), engine._engine.add_request

    def slow(*args: Any, **options: Any) -> str:
        begun.set()
        assert cancelled.wait(20)
        return add(*args, **options)

    async def run() -> None:
        monkeypatch.setattr(engine._engine, "add_request", slow)
        task = asyncio.create_task(collect(engine, "Once", LONG, "gone"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await engine._call(lambda: None)  # after all pending work of the thread
        assert not engine._engine.has_unfinished_requests()

    asyncio.run(run())


def test_a_shutdown_ends_waiting_requests() -> None:
    """Regression: a waiting request and a new one both hung after a shutdown."""
    engine = VLLMAsync.from_engine_args(EngineArgs(model=MODEL, num_gpu_blocks_override=64))

    async def run() -> None:
        task = asyncio.create_task(collect(engine, "Once", LONG, "a"))
        while not engine._outputs:
            await asyncio.sleep(0)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine, "Once", LONG, "b")

    asyncio.run(run())
