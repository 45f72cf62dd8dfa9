"""vLLM's logits processors and the row indices that they receive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.as_vllm.llm import VLLM
from nanoengine.as_vllm.params import VLLMParams
from nanoengine.as_vllm.processors import (
    AdapterLogitsProcessor,
    BatchedProcessor,
    BatchUpdate,
    MoveDirectionality,
    VLLMProcessor,
    process_dict_updates,
)
from nanoengine.assets import demo_model_path
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
