"""User-defined logits processors: inputs, errors, and equal outputs with every feature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoengine import LLM, BeamSearchParams, ConfigError, RequestError, SamplingParams
from nanoengine.core.speculation import set_drafts
from nanoengine.settings.config import EngineConfig
from tests.support.engines import (
    checkpoint,
    finish,
    greedy,
    make_engine,
    random_prompts,
    run,
    tokens,
)
from tests.support.processors import as_they_are, either, force, forced_text, forced_token

NUM_TOKENS = 16
PROMPTS = random_prompts(6, [1, 9, 20, 33])
FORCED = [[forced_text(prompt, NUM_TOKENS)] for prompt in PROMPTS]
SMALL_POOL = {"block_size": 8, "num_kv_blocks": 18}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap": True},
    "chunks": {"long_prefill_threshold": 7, "block_size": 8},
    "small pool": SMALL_POOL,
    "small pool, overlapped": SMALL_POOL | {"overlap": True},
}
every_setting = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)


@every_setting
def test_a_function_of_prompt_and_output_forces_tokens(options: dict[str, Any]) -> None:
    one = replace(greedy(NUM_TOKENS), logits_processors=[force])
    drawn = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, temperature=2.0, logits_processors=[force]
    )
    engine = make_engine(checkpoint("qwen3"), **options)
    assert tokens(run(engine, PROMPTS, [one, drawn] * 3)) == FORCED
    assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in options)
    for_all = make_engine(checkpoint("qwen3"), logits_processors=[force], **options)
    assert tokens(run(for_all, PROMPTS, greedy(NUM_TOKENS))) == FORCED


@every_setting
def test_the_token_ids_of_a_function_fork_with_a_sequence(options: dict[str, Any]) -> None:
    params = SamplingParams(
        n=3, max_tokens=NUM_TOKENS, ignore_eos=True, seed=5, logits_processors=[either]
    )
    found = tokens(run(make_engine(checkpoint("qwen3"), **options), PROMPTS, params))
    for prompt, outputs in zip(PROMPTS, found, strict=True):
        assert len({tuple(output) for output in outputs}) > 1, "the sequences of a request are"
        " equal"
        for output in outputs:
            for i, token_id in enumerate(output):
                first = forced_token(prompt, output[:i])
                assert token_id in (first, 3 + (first + 1) % 253)
    assert found == tokens(run(make_engine(checkpoint("qwen3")), PROMPTS, params))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exception_after_an_accepted_draft_ends_the_request_at_the_same_token(
    overlap: bool,
) -> None:
    def gives_up(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise KeyError("gone")
        return logits

    params = replace(greedy(NUM_TOKENS), logits_processors=[gives_up])
    engine = make_engine(checkpoint("qwen3"), overlap=overlap, logits_processors=[force])
    request = engine.add_request("a", PROMPTS[1], params)
    text = forced_text(PROMPTS[1], NUM_TOKENS)
    while engine.has_unfinished():
        engine.step()
        engine.finish_in_flight()
        for seq in engine.scheduler.running:
            set_drafts(engine.scheduler, seq, tuple(text[seq.num_output_tokens :][:4]))
    assert "gives_up raised KeyError" in str(request.error)
    assert tokens([request]) == [[text[:3]]]


def test_a_fork_between_steps_continues_from_its_next_token() -> None:
    engine = make_engine(checkpoint("qwen3"), logits_processors=[force])
    request = engine.add_request("a", PROMPTS[1], greedy(6))
    for _ in range(3):
        engine.step()
    engine.fork("a", next_token_id=7)
    finish(engine)
    first, second = (seq.output_token_ids for seq in request.sequences)
    assert first == forced_text(PROMPTS[1], 6)
    expected = [*first[:2], 7]
    while len(expected) < 6:
        expected.append(forced_token(PROMPTS[1], expected))
    assert second == expected


def test_user_processors_run_in_order_after_the_standard_ones() -> None:
    seen: list[tuple[str, float]] = []

    def add(name: str) -> Any:
        def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            seen.append((name, round(logits[9].item(), 6)))
            return logits + 1

        return processor

    of_all = make_engine(checkpoint("qwen3"), logits_processors=[add("a"), add("b")])
    params = SamplingParams(
        temperature=0, max_tokens=1, logit_bias={9: 50.0}, logits_processors=[add("c")]
    )
    ((found,),) = tokens(run(of_all, PROMPTS[:1], params))
    assert [name for name, _ in seen] == ["a", "b", "c"]
    first = seen[0][1]
    assert first > 25, "the logit bias was applied first"
    assert [value for _, value in seen] == pytest.approx([first, first + 1, first + 2])
    assert found == [9]


class FailingProcessor:
    """Edits sequences whose prompt starts with `marked`. For these, it raises in the method
    `where`, or with "state" sets the error of their state."""

    def __init__(self, where: str, marked: int) -> None:
        self.where, self.marked = where, marked
        self.one_by_one = where == "apply"

    def admit(self, sequence: Any) -> FailingProcessor.State | None:
        if sequence.token_ids[0] != self.marked:
            return FailingProcessor.State("nowhere")
        self.raise_at("admit", len(sequence.token_ids) - sequence.num_prompt_tokens >= 0)
        return FailingProcessor.State(self.where)

    def apply(self, logits: torch.Tensor, lines: Any, states: Any) -> None:
        for line, state in zip(lines, states, strict=True):
            logits[line] *= 1.0
            if state.where in ("apply", "state") and state.count == 2:
                logits[line] = 7.0
                state.error = ValueError("not that one")
                self.raise_at("apply", True)

    def raise_at(self, where: str, now: bool) -> None:
        if where == self.where and now:
            raise ValueError("not that one")

    class State:
        error: Exception | None = None

        def __init__(self, where: str, count: int = 0) -> None:
            self.where, self.count = where, count

        def accept(self, token_id: int) -> None:
            self.count += 1
            if self.where == "accept" and self.count == 2:
                raise ValueError("not that one")

        def fork(self) -> FailingProcessor.State:
            if self.where == "fork":
                raise ValueError("not that one")
            return FailingProcessor.State(self.where, self.count)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["admit", "accept", "apply", "state", "fork"])
def test_an_exception_ends_only_the_request_that_raised_it(where: str, overlap: bool) -> None:
    params = [replace(greedy(8), temperature=0.7, n=2 if where == "fork" else 1, seed=3)] * 6
    expected = tokens(run(make_engine(checkpoint("qwen3")), PROMPTS, params))
    marked = PROMPTS[2][0]
    assert [prompt[0] for prompt in PROMPTS].count(marked) == 1
    engine = make_engine(
        checkpoint("qwen3"), overlap=overlap, logits_processors=[FailingProcessor(where, marked)]
    )
    requests = [engine.add_request(str(i), p, params[0]) for i, p in enumerate(PROMPTS)]
    finish(engine)
    failed = requests[2]
    assert failed.error == "logits processor FailingProcessor raised ValueError: not that one"
    last = failed.sequences[-1]
    assert last.finish_reason == "error"
    reached = {"admit": 0, "accept": 2, "apply": 2, "state": 2, "fork": 0}[where]
    assert last.output_token_ids == expected[2][-1][:reached]
    others = [r for r in requests if r is not failed]
    assert tokens(others) == expected[:2] + expected[3:]
    assert not any(r.error for r in others)
    again = run(engine, PROMPTS[:2], params[:2])
    assert tokens(again) == expected[:2], "the engine continues"


def run_to_errors(prompts: Any, params: SamplingParams, **options: Any) -> list[str | None]:
    """Returns the error of each request, None where it succeeded."""
    engine = make_engine(checkpoint("qwen3"), **options)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    finish(engine)
    return [request.error for request in requests]


def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("gone")


def raises_much(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("x" * 10**6)


def cut(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[:5]


@pytest.mark.parametrize(
    ("processors", "shown"),
    [
        ([raises], "raises raised KeyError: 'gone'"),
        ([raises_much], "raises_much raised ValueError: xxx"),
        ([lambda output, logits: None], "must return logits of shape (256,), got None"),
        ([as_they_are, cut], "cut must return logits of shape (256,), got torch.Size([5])"),
        ([lambda output, x: x.tolist()], "got a value of type list: return a torch.Tensor"),
        ([lambda output, x: x.numpy()], "got a value of type ndarray: return a torch.Tensor"),
    ],
)
def test_the_error_names_a_function_that_raises_or_returns_no_logits(
    processors: Any, shown: str
) -> None:
    (error,) = run_to_errors(PROMPTS[:1], replace(greedy(2), logits_processors=processors))
    assert shown in str(error) and len(str(error)) < 1200


def test_a_function_is_called_once_per_sequence_and_step_and_its_exception_is_reported() -> None:
    calls: list[int] = []

    def fails_at_its_third_call(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        if len(calls) == 3:
            raise KeyError("only once")
        return logits.clone()

    engine = make_engine(checkpoint("qwen3"))
    params = replace(greedy(4), logits_processors=[fails_at_its_third_call])
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS[:4])]
    finish(engine)
    assert [request.error is None for request in requests] == [True, True, False, True]
    assert len(calls) == 4 + 3 * 3, "three rows go on for three more steps"
    assert tokens(requests)[3:] == tokens(run(engine, PROMPTS[3:4], greedy(4)))


def test_an_exception_of_a_batch_processor_ends_the_requests_of_that_call() -> None:
    class FailsOnce(FailingProcessor):
        calls = 0

        def admit(self, sequence: Any) -> FailingProcessor.State | None:
            return (
                None
                if sequence.token_ids[0] == PROMPTS[1][0]
                else FailingProcessor.State("nowhere")
            )

        def apply(self, logits: torch.Tensor, lines: Any, states: Any) -> None:
            self.calls += 1
            self.raise_at("apply", self.calls == 2)

    stage = FailsOnce("apply", -1)
    stage.one_by_one = False
    errors = run_to_errors(PROMPTS[:3], greedy(4), logits_processors=[stage])
    why = "logits processor FailsOnce raised ValueError: not that one"
    assert errors == [why, None, why]
    assert stage.calls == 2, "the batch was processed again to find the failing sequence"


def test_invalid_processors_raise_and_are_named() -> None:
    for given in ("package.module:Class", 3):
        with pytest.raises(ConfigError, match=r"logits_processors\[0\] must be a function or"):
            EngineConfig(model="m", logits_processors=[given])
    with pytest.raises(ConfigError, match="must be functions or instances, got <class"):
        make_engine(checkpoint("qwen3"), logits_processors=[FailingProcessor])
    with pytest.raises(RequestError, match=r"logits_processors\[0\] must be a function, got 'f'"):
        SamplingParams(logits_processors=["f"])
    with pytest.raises(ConfigError, match=r"lambda.*can't be sent to a rank"):
        make_engine(
            checkpoint("qwen3"), tensor_parallel_size=2, logits_processors=[lambda ids, x: x]
        )


def test_a_beam_search_raises_if_the_llm_has_processors() -> None:
    directory = checkpoint("qwen3")
    with (
        LLM(directory, skip_tokenizer_init=True, kv_cache_gib=0.01, logits_processors=[force])
        as llm,
        pytest.raises(RequestError, match="logits_processors"),
    ):  # fmt: skip
        llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=3))
