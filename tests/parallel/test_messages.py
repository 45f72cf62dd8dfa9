"""Messages over the pipes: every field of a plan and of a result survives the round trip."""

from __future__ import annotations

import dataclasses
import pickle
from multiprocessing import Pipe
from typing import Any

import pytest

from nanoengine.core.plan import (
    AdmittedSequence,
    BlockCopy,
    ChosenToken,
    Fork,
    Preemption,
    StepPlan,
    StepResult,
    StepTimes,
    TableUpdate,
    TokenLogprob,
    Transfer,
)
from nanoengine.ranks.executor import pickled
from nanoengine.settings.params import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=3, seed=2**62, logit_bias={7: -1.5}, stop=["end"])
PLAN = StepPlan(
    step=2**40,
    released=[3, 0],
    admitted=[
        AdmittedSequence(3, 9, [5, 2**19, 5], 2, 1, PARAMS, 2**63 - 1, ((1, 2), (3,))),
        AdmittedSequence(0, 10, [4], 1, 0, PARAMS, 0),
    ],
    forks=[Fork(1, 3, 11, 77)],
    chosen_tokens=[ChosenToken(2, 40, 8)],
    table_updates=[TableUpdate(3, 1, 0, (4, 2**31)), TableUpdate(1, 0, 7, ())],
    transfers=[Transfer("load", "host", (1, 2), (3, 4))],
    block_copies=[BlockCopy(4, 5)],
    rows=[3, 0, 1],
    starts=[0, 0, 2],
    num_scheduled_tokens=[3, 1, 0],
    num_logits=[1, 3, 1],
    draft_token_ids={0: (6, 7)},
    preempted=[Preemption(8, 12, "no blocks")],
    reasons=["why"],
    waits=[(8, "blocks")],
)
RESULT = StepResult(
    token_ids=[[5], [], [6, 7]],
    logprobs={0: [[TokenLogprob(5, -0.25, 1), TokenLogprob(6, float("-inf"), 2)]]},
    prompt_logprobs={1: [[TokenLogprob(4, -1e-300, 1)]]},
    errors={1: "NaN"},
    pooled={2: [0.5, -1e-30]},
    times=StepTimes(schedule_s=1.0, prepare_s=2.0, load_s=3.0, forward_s=4.0, sample_s=5.0),
)


@pytest.mark.parametrize("message", [PLAN, RESULT], ids=["plan", "result"])
def test_every_field_survives_the_round_trip(message: Any) -> None:
    fresh = type(message)(**({"step": 0} if message is PLAN else {"token_ids": []}))
    fields = [field.name for field in dataclasses.fields(message)]
    same = [name for name in fields if getattr(message, name) == getattr(fresh, name)]
    assert same == [], "a field that says nothing would come back in any case"
    ours, theirs = Pipe()
    ours.send_bytes(pickled((7, message)))
    step, found = theirs.recv()
    assert step == 7
    for name in fields:
        assert getattr(found, name) == getattr(message, name)
        assert repr(getattr(found, name)) == repr(getattr(message, name)), "types too"
    shared = found.admitted[0].params is found.admitted[1].params if message is PLAN else True
    assert shared, "parameters of many sequences are sent once"


def test_a_step_of_decodes_takes_a_few_bytes_per_row() -> None:
    rows = range(256)
    plan = StepPlan(
        step=5,
        rows=list(rows),
        starts=[300 + row for row in rows],
        num_scheduled_tokens=[1] * 256,
        num_logits=[1] * 256,
        table_updates=[TableUpdate(row, 0, 20, (row,)) for row in rows[::16]],
    )
    assert len(pickled((7, plan))) < 12 * 256
    assert pickle.loads(pickled((7, plan))) == (7, plan)
