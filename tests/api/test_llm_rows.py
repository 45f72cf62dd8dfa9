"""Rows: the content of one affects no other; prompt formats of other libraries are accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import nanoengine
from nanoengine import (
    LLM,
    BeamSearchParams,
    CapacityError,
    ConfigError,
    NanoEngineError,
    PromptTooLongError,
    RequestError,
    Row,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanoengine.text.prompts import LONG_TEXT
from nanoengine.text.tokenizer import Tokenizer
from tests.support.fake_executor import make_engine
from tests.support.fake_llm import ANSWERS, LONG, MakeLLM, assert_idle, executor, ids, texts
from tests.support.text_fixtures import CHAT_TEMPLATE

TALK = [{"role": "user", "content": "go home"}]
TOKENS = [5] * 40


class Raising(dict[str, Any]):
    """A row whose `get` raises."""

    def get(self, *args: object) -> Any:
        raise ZeroDivisionError("a row of a kind of its own")


BAD_ROWS: list[tuple[Any, str]] = [
    ([], "the prompt is empty"),
    ("", "the prompt is empty"),
    ([10**6], "prompt token ids must be in"),
    ([5, "6"], "prompt token ids must be integers, got '6'"),
    ([1.5], "prompt token ids must be integers, got 1.5"),
    ([True], "prompt token ids must be integers, got True"),
    (7, "a prompt must be a string"),
    (None, "a prompt must be a string"),
    (Row(Row("one")), "a prompt must be a string"),
    ({}, "a prompt dict needs one of"),
    ({"prompt": 3}, "prompt must be a string or None, got 3"),
    ({"prompt": "one", "cach_salt": "x"}, "did you mean 'cache_salt'"),
    ({"prompt": "one", "multi_modal_data": {"image": 1}}, "'multi_modal_data' must be None"),
    ("\ud800", "the text can't be encoded"),
    ({"prompt_token_ids": TOKENS, "cache_salt": "\ud800"}, "cache_salt can't be encoded as UTF-8"),
    ({"prompt_token_ids": TOKENS, "prompt": "\ud800"}, "prompt can't be encoded as UTF-8"),
    ([5] * 100, "the prompt has 100 tokens"),
    ([5] * 90, "the prompt of 90 tokens needs 12 KV blocks"),
    ({"messages": []}, "a conversation must be a list"),
    ({"messages": [{"role": 5}]}, "a message must be a dict"),
    ({"messages": TALK, "chat_template_kwargs": 5}, "must be a dict with string keys, got 5"),
    (
        {"messages": TALK, "chat_template_kwargs": {5: 1}},
        "must be a dict with string keys, got {5: 1}",
    ),
    ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "can't set 'messages'"),
    ({"messages": TALK, "chat_template": 5}, "chat_template must"),
    ({"messages": TALK, "chat_template": "{{ 1 / 0 }}"}, "the chat template refused"),
    ({"messages": TALK, "add_generation_prompt": "no"}, "must be True or False, got 'no'"),
    ({"messages": TALK, "tools": "x"}, "'tools' must be a list"),
    (Raising(prompt="a"), "ZeroDivisionError: a row of a kind of its own"),
    (Row(RequestError("line 3 is torn"), key="r"), "line 3 is torn"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=lambda one: str(one)[:40])
def test_an_invalid_prompt_raises_before_anything_runs_or_is_recorded(
    make_llm: MakeLLM, row: Any, message: str
) -> None:
    """Regression: some of these ended the call, or the step of all running requests."""
    prompts = ["one", row, "dog"]
    calls: list[Callable[[LLM, str], Any]] = [
        lambda llm, how: llm.generate(prompts, LONG, use_tqdm=False, on_error=how),
        lambda llm, how: llm.stream(prompts, LONG, on_error=how),
        lambda llm, how: list(llm.stream(iter(prompts), LONG, on_error=how)),
    ]
    with make_llm(ANSWERS, num_blocks=10) as llm:
        for call in calls:
            with pytest.raises(NanoEngineError, match="prompt 1: ") as caught:
                call(llm, "raise")
            assert message in str(caught.value)
            assert_idle(llm)
            assert isinstance(caught.value, PromptTooLongError) == ("prompt has" in message)
            assert isinstance(caught.value, RequestError) != ("prompt of" in message)
        assert llm.stats().steps == 0
        for call in calls:
            first, failed, last = sorted(call(llm, "record"), key=lambda output: output.index)
            assert texts([first, last]) == [ANSWERS["one"], ANSWERS["dog"]]
            assert [one.finish_reason for one in failed.outputs] == ["error"]
            assert failed.finished and message in failed.error
            assert failed.key == getattr(row, "key", None)
            assert all(type(token) is int for token in failed.prompt_token_ids)
            assert len({first.request_id, failed.request_id, last.request_id}) == 3
        assert_idle(llm)


def test_a_closed_llm_raises_and_is_not_recorded_as_a_rows_error(make_llm: MakeLLM) -> None:
    """An error of the LLM, not of the row, is raised unchanged."""
    llm = make_llm(ANSWERS)

    def rows() -> Iterator[str]:
        yield "one"
        llm.close()
        yield "dog"

    with pytest.raises(NanoEngineError, match="closed") as caught:
        list(llm.stream(rows(), LONG, on_error="record"))
    assert not isinstance(caught.value, RequestError)


# --- content parts --------------------------------------------------------------------------------

OF_LISTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "({{ part['text'] }}){% endfor %}</s>{% endfor %}"
)
OF_BOTH = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}({{ part['text'] }}){% endfor %}{% endif %}</s>"
    "{% endfor %}"
)
AS_JSON = "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (CHAT_TEMPLATE, "<|user|>go\nhome</s><|assistant|>"),
        ("{% for m in messages %}{{ '<|user|>' + m['content'] }}{% endfor %}", "<|user|>go\nhome"),
        (OF_LISTS, "<|user|>(go)(home)</s>"),
        (OF_BOTH, "<|user|>(go)(home)</s>"),
        (AS_JSON, '"go\\nhome"'),
    ],
    ids=["printed", "added", "lists", "both", "json"],
)
def test_text_parts_reach_a_template_in_the_format_that_it_expects(
    llm: LLM, template: str, shown: str
) -> None:
    """Regression: templates that take strings printed the list, with its quotes and braces."""
    parts = [{"type": "text", "text": "go"}, {"type": "text", "text": "home"}]
    options: dict[str, Any] = {"chat_template": template, "use_tqdm": False}
    for content in (parts, ["go", "home"], tuple(parts)):
        (output,) = llm.chat([{"role": "user", "content": content}], LONG, **options)
        assert output.prompt == shown


def test_conversations_of_strings_are_unchanged(llm: LLM) -> None:
    """For a template that prints JSON, strings stay strings."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (output,) = llm.chat(talk, LONG, chat_template=AS_JSON, use_tqdm=False)
    assert output.prompt == '"a""b"'


def test_a_message_that_the_template_drops_fails_only_its_row(llm: LLM) -> None:
    users_alone = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    talks = [TALK, [{"role": "system", "content": "Be brief."}, *TALK]]
    options: dict[str, Any] = {"chat_template": users_alone, "use_tqdm": False}
    first, second = llm.chat(talks, LONG, on_error="record", **options)
    assert first.error is None and first.prompt == "go home"
    assert "drops the content of messages[0] with role 'system'" in (second.error or "")


# --- entry points ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ["x"]}, "request_id must be a string"),
        ({"request_id": 5}, "request_id must be a string"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list"),
        ({"params": None}, "params must be SamplingParams"),
        ({"params": {}}, "params must be SamplingParams"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"cache_salt": 5}, "cache_salt must be a string"),
        ({"cache_salt": "\ud800"}, "cache_salt can't be encoded"),
        ({"bad_word_ids": ((10**9,),)}, "bad_word_ids must be in"),
        ({"bad_word_ids": (("x",),)}, "bad_word_ids must be integers"),
    ],
)
def test_wrong_types_in_engine_calls_raise_nanoengine_errors(
    changes: dict[str, Any], message: str
) -> None:
    """Regression: a salt that can't be encoded ended the step of all requests."""
    engine = make_engine()
    engine.add_request("good", [1, 2, 3], SamplingParams(max_tokens=2))
    given: dict[str, Any] = {
        "request_id": "bad",
        "prompt_token_ids": [*range(20)],
        "params": SamplingParams(),
    }
    given |= changes
    args = [given.pop(name) for name in ("request_id", "prompt_token_ids", "params")]
    with pytest.raises(RequestError, match=message):
        engine.add_request(*args, **given)
    assert engine.num_unfinished == 1
    while engine.has_unfinished():
        engine.step()


def test_numpy_integers_are_accepted_everywhere(llm: LLM) -> None:
    """Ids and priorities; queued requests hold Python integers."""
    (output,) = llm.generate([ids("one")], LONG, False, priority=[np.int64(3)])  # type: ignore[list-item]
    assert output.outputs[0].text == ANSWERS["one"]
    numbers: Any = [np.int64(5), np.uint8(6)]
    request = llm.engine.add_request("own", numbers, LONG, priority=np.int32(1))  # type: ignore[arg-type]
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}
    assert type(request.priority) is int


def test_the_error_of_a_too_long_prompt_mentions_the_watermark() -> None:
    """Regression: the message was "needs 19 KV blocks, the pool has 22", with no explanation."""
    engine = make_engine(num_blocks=23, watermark_frac=0.2)
    with pytest.raises(CapacityError, match=r"needs 19 KV blocks .* has 22 and keeps"):
        engine.add_request("a", [1] * 73, SamplingParams())
    with pytest.raises(CapacityError, match=r"keeps 4 of them free .* or lower watermark_frac"):
        engine.add_request("a", [1] * 73, SamplingParams())
    engine = make_engine(num_blocks=23)
    with pytest.raises(CapacityError, match="the pool has 22: shorten it"):
        engine.add_request("a", [1] * 100, SamplingParams())


# --- formats of other libraries -------------------------------------------------------------------


def test_vllm_names_have_the_same_meaning(make_llm: MakeLLM) -> None:
    """get_tokenizer, get_default_sampling_params, use_tqdm as third argument, no LoRA adapter."""
    with make_llm(ANSWERS, generation_defaults={"temperature": 0.0}) as llm:
        assert llm.get_tokenizer() is llm.tokenizer.backend
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
        assert texts(llm.generate(["one"], LONG, False)) == [ANSWERS["one"]]
        assert texts(llm.generate(["one"], LONG, False, None)) == [ANSWERS["one"]]
        (output,) = llm.chat(TALK, LONG, False, lora_request=None, chat_template=CHAT_TEMPLATE)
        assert output.finished
        beams = BeamSearchParams(beam_width=1, max_tokens=2)
        assert llm.beam_search("one", beams, lora_request=None, use_tqdm=False)
        assert_idle(llm)


def test_vllms_prompt_classes_are_dicts(llm: LLM) -> None:
    """TextPrompt and TokensPrompt, with empty multimodal keys."""
    assert nanoengine.text.prompt_forms.TextPrompt is TextPrompt
    prompts = [
        TextPrompt(prompt="one"),
        TokensPrompt(prompt_token_ids=ids("one")),
        {"prompt": "one", "multi_modal_data": None, "mm_processor_kwargs": {}},
    ]
    assert type(prompts[0]) is dict
    assert texts(llm.generate(prompts, LONG, use_tqdm=False)) == [ANSWERS["one"]] * 3


class Column:
    """The interface of a data frame's column."""

    def __init__(self, values: list[Any]) -> None:
        self.values = np.array(values, dtype=object)
        self.dtype = self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def tolist(self) -> list[Any]:
        return list(self.values.tolist())


def test_arrays_and_columns_are_lists_of_prompts(llm: LLM) -> None:
    """`frame["question"]` and `frame["question"].values`."""
    prompts = list(ANSWERS)
    expected = list(ANSWERS.values())
    for given in (np.array(prompts), np.array(prompts, dtype=object), Column(prompts)):
        assert texts(llm.generate(given, LONG, use_tqdm=False)) == expected  # type: ignore[arg-type]
        outputs = sorted(llm.stream(given, [LONG] * 3), key=lambda o: o.index)  # type: ignore[arg-type]
        assert texts(outputs) == expected
    rows = Column([ids("one"), {"prompt": "dog"}])
    assert texts(llm.generate(rows, LONG, use_tqdm=False)) == expected[:2]  # type: ignore[arg-type]
    (single,) = llm.generate(np.array("one"), LONG, use_tqdm=False)  # type: ignore[arg-type]
    assert single.prompt == "one"
    talks = Column([TALK, TALK])
    options: dict[str, Any] = {"chat_template": CHAT_TEMPLATE, "use_tqdm": False}
    assert len(llm.chat(talks, LONG, **options)) == 2  # type: ignore[arg-type]


PROGRESS = "use_tqdm must be True, False or a function, got"
BEAMS = BeamSearchParams(beam_width=1, max_tokens=2)


def with_part(llm: LLM, part: object) -> Any:
    talk = [*TALK, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    return llm.chat(talk, LONG, False, chat_template=CHAT_TEMPLATE)


INVALID_CALLS: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda llm: llm.generate(["one", "dog"], [LONG] * 3, False), "got 3 for 2 prompts"),
    (lambda llm: llm.generate(["one", "dog"], LONG, False, priority=[1]), "priority.*got 1 for 2"),
    (lambda llm: llm.generate(["one", "dog"], [LONG, {"n": 1}], False), r"sampling_params\[1\]"),
    (lambda llm: llm.generate("one", on_error="ignore", use_tqdm=False), "on_error"),
    (lambda llm: llm.generate(iter(["one"]), LONG, False), r"stream\(\) also takes"),
    (lambda llm: llm.generate(Column(["one", math.nan]), LONG, False), "prompt 1: .*got float"),
    (lambda llm: llm.generate(np.zeros((2, 3), int), LONG, False), "got ndarray"),
    (lambda llm: llm.generate("one", LONG, lora_request="x"), "lora_request must be None"),
    (lambda llm: llm.stream("one", kind="all"), "kind must be one of 'final', 'cumulative'"),
    (lambda llm: llm.stream(iter(["one"]), [LONG]), "share one"),
    (lambda llm: llm.chat(TALK, LONG, False), "prompt 0: .*no chat template"),
    (lambda llm: llm.chat("hi", LONG, False), "messages|conversation"),
    (lambda llm: llm.chat([[{"content": "hi"}]], LONG, False), "message"),
    (lambda llm: llm.chat([[]], LONG, False), "conversation"),
    (lambda llm: llm.chat(TALK, LONG, lora_request=5), "lora_request must be None"),
    (lambda llm: with_part(llm, {"type": "image_url"}), r"messages\[1\].*of type 'image_url'"),
    (lambda llm: with_part(llm, {"text": "hi"}), r"messages\[1\].*got one of type None"),
    (lambda llm: with_part(llm, {"type": "text"}), r"messages\[1\].*got one of type 'text'"),
    (lambda llm: with_part(llm, 5), r"messages\[1\].*got one of type 'int'"),
    (lambda llm: llm.beam_search("one", BEAMS, lora_request=5), "lora_request must be None"),
]
for wrong in ("no", None, 1):
    INVALID_CALLS += [
        (lambda llm, wrong=wrong: llm.generate("one", LONG, use_tqdm=wrong), PROGRESS),
        (lambda llm, wrong=wrong: list(llm.stream("one", LONG, use_tqdm=wrong)), PROGRESS),
    ]
for wrong in (5, None, b"x"):
    INVALID_CALLS.append((lambda llm, wrong=wrong: LLM(wrong), "model must be"))
for wrong in (None, SamplingParams(), 5):
    INVALID_CALLS.append(
        (lambda llm, wrong=wrong: llm.beam_search("one", wrong), "params must be BeamSearchParams")
    )


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS)
def test_unsupported_arguments_of_calls_raise_nanoengine_errors(llm, call, message):
    """Regression: some raised a TypeError or AttributeError, and "no" counted as true."""
    with pytest.raises((RequestError, ConfigError), match=message):
        call(llm)
    assert_idle(llm)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_more_completions_than_rows_wait_for_rows(make_llm: MakeLLM, max_num_seqs: int) -> None:
    """Regression: n above max_num_seqs raised an error."""
    highest, params = 0, SamplingParams(n=7, max_tokens=64)

    def count(plan: Any) -> None:
        nonlocal highest
        highest = max(highest, llm.engine.scheduler.num_running)

    with make_llm(ANSWERS, max_num_seqs=max_num_seqs) as llm:
        executor(llm).hook = count
        shown = dict.fromkeys(itertools.product((0, 1), range(7)), "")
        for output in llm.stream(["one", "dog"], params, kind="delta"):
            for completion in output.outputs:
                shown[output.index, completion.index] += completion.text
        assert list(shown.values()) == [ANSWERS["one"]] * 7 + [ANSWERS["dog"]] * 7
        assert highest <= max_num_seqs
        assert_idle(llm)


FAR_TOO_LONG = "the dog " * 100_000


def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a text of 15 MB was rejected only after 54 s and with 4.2 GiB."""
    llm = make_llm({"one": "two"})
    encode, lengths = Tokenizer.encode, []

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    chat = {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}
    chat["chat_template"] = "{{ messages[0]['content'] }}"
    for prompt in (FAR_TOO_LONG, {"prompt": FAR_TOO_LONG}, chat):
        lengths.clear()
        with pytest.raises(PromptTooLongError, match=r"prompt 0: the prompt has at least \d+ tok"):
            llm.generate([prompt], SamplingParams(), use_tqdm=False)
        assert lengths == [LONG_TEXT]
        first, second = llm.generate(["one", prompt], on_error="record", use_tqdm=False)
        assert first.outputs[0].text == "two"
        assert second.error is not None and "shorten it, or raise max_model_len" in second.error


def test_a_long_prompt_that_fits_is_encoded(make_llm: MakeLLM) -> None:
    text = FAR_TOO_LONG[: 2 * LONG_TEXT]
    llm = make_llm({}, max_model_len=10**6, num_blocks=20_000)
    (output,) = llm.generate([text], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.prompt_token_ids) == len(llm.tokenizer.encode(text))
    small = make_llm({}, max_model_len=10**6)
    with pytest.raises(CapacityError, match=r"the prompt of at least \d+ tokens needs \d+ KV blo"):
        small.generate([text], use_tqdm=False)
