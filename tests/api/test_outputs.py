"""Outputs: fields with vLLM's meanings, and times computed from a request's timestamps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from nanoengine.core.plan import TokenLogprob
from nanoengine.llm_mixins import error_output
from nanoengine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    logprob_dicts,
    request_metrics,
)
from nanoengine.text.prompts import RefusedPrompt


def fake_request(*marks: tuple[float | None, float | None, float | None, float | None, int]):
    sequences = [
        SimpleNamespace(
            first_scheduled_time=scheduled,
            first_token_time=first,
            last_token_time=last,
            finish_time=end,
            output_token_ids=[0] * count,
        )
        for scheduled, first, last, end, count in marks
    ]
    return SimpleNamespace(arrival_time=10.0, sequences=sequences, finished=True)


@pytest.mark.parametrize(
    ("marks", "queued_s", "ttft_s", "itl_s", "e2e_s"),
    [
        ([(11.0, 13.0, 17.0, 18.0, 5)], 1.0, 3.0, 1.0, 8.0),
        # for several sequences, the first start and the last end count
        ([(11.0, 13.0, 15.0, 15.0, 3), (12.0, 14.0, 20.0, 20.0, 4)], 1.0, 3.0, 8 / 5, 10.0),
        ([(None, None, None, 12.0, 0)], None, None, None, 2.0),
        ([(11.0, 12.0, 12.0, 12.0, 1)], 1.0, 2.0, None, 2.0),
    ],
)
def test_metrics_are_differences_of_timestamps(marks, queued_s, ttft_s, itl_s, e2e_s):
    assert request_metrics(fake_request(*marks)) == RequestMetrics(
        queued_s=queued_s,
        prefill_s=None if ttft_s is None else ttft_s - queued_s,
        ttft_s=ttft_s,
        itl_s=itl_s,
        e2e_s=e2e_s,
    )


def test_logprobs_keep_the_sampled_token_first_and_once() -> None:
    position = [TokenLogprob(7, -2.0, 3), TokenLogprob(1, -0.5, 1), TokenLogprob(7, -2.0, 3)]
    (candidates,) = logprob_dicts([position], {1: " the", 7: " dog"}.__getitem__)
    assert list(candidates) == [7, 1]
    assert candidates[7] == Logprob(logprob=-2.0, rank=3, decoded_token=" dog")
    (bare,) = logprob_dicts([position], None)
    assert bare[1].decoded_token is None


def test_an_error_output_keeps_index_and_key_and_has_the_reason() -> None:
    refused = RefusedPrompt(index=2, text="text", token_ids=[1], message="too long", key=None)
    output = error_output("3", refused)
    assert (output.index, output.finished, output.error) == (2, True, "too long")
    assert [o.finish_reason for o in output.outputs] == ["error"]


def test_outputs_are_frozen_and_report_whether_they_are_finished() -> None:
    growing = CompletionOutput(index=0, text="a", token_ids=[1])
    assert not growing.finished
    with pytest.raises(dataclasses.FrozenInstanceError):
        growing.text = "b"  # type: ignore[misc]
