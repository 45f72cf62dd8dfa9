"""LLM: prompt formats, order, errors, streams; a call leaves no state in the engine."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import nanoengine
from nanoengine import LLM, ConfigError, NanoEngineError, RequestError, Row, SamplingParams
from nanoengine.text.end_tokens import bad_word_ids
from nanoengine.text.prompt_forms import PAUSE
from nanoengine.text.tokenizer import Tokenizer
from tests.support.fake_llm import ANSWERS, LONG, Bar, MakeLLM, assert_idle, executor, ids, texts
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_fallback, byte_level

# --- generate -------------------------------------------------------------------------------------


def test_outputs_are_in_input_order(llm: LLM) -> None:
    prompts = ["€", "nothing", "one", "dog", "€"]
    outputs = llm.generate(prompts, LONG, use_tqdm=False)
    assert texts(outputs) == [ANSWERS.get(prompt, "") for prompt in prompts]
    assert [o.index for o in outputs] == [0, 1, 2, 3, 4]
    assert [o.prompt for o in outputs] == prompts
    assert len({o.request_id for o in outputs}) == 5
    assert all(o.finished and o.outputs[0].finish_reason == "stop" for o in outputs)
    assert_idle(llm)


def test_all_prompt_types_can_be_mixed(llm: LLM) -> None:
    forms = [
        "one",
        ids("one"),
        {"prompt": "one", "cache_salt": "mine"},
        {"prompt_token_ids": ids("one")},
        {"prompt": "shown", "prompt_token_ids": ids("one")},
        tuple(ids("one")),
    ]
    outputs = llm.generate(forms, LONG, use_tqdm=False)
    assert texts(outputs) == [" two three."] * len(forms)
    assert [o.prompt for o in outputs] == ["one", None, "one", None, "shown", None]
    assert all(o.prompt_token_ids == ids("one") for o in outputs)


def test_one_prompt_of_any_type_is_one_prompt(llm: LLM) -> None:
    for single in ("one", ids("one"), {"prompt": "one"}, Row("one", sampling_params=LONG)):
        assert texts(llm.generate(single, LONG, use_tqdm=False)) == [" two three."]
        assert texts(llm.stream(single, LONG)) == [" two three."]
    assert llm.generate([], LONG, use_tqdm=False) == []


@pytest.mark.parametrize("on_error", ["raise", "record"])
def test_a_request_that_fails_while_running_affects_no_other(llm: LLM, on_error: str) -> None:
    def fail_second_row(plan: Any) -> dict[int, str] | None:
        return {plan.rows.index(1): "NaN logits"} if plan.step == 1 and 1 in plan.rows else None

    executor(llm).hook = fail_second_row
    outputs = llm.generate(["one", "dog", "€"], LONG, use_tqdm=False, on_error=on_error)
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert outputs[1].error == "NaN logits"
    assert texts(outputs)[::2] == [ANSWERS["one"], ANSWERS["€"]]
    assert_idle(llm)


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_leaves_nothing_for_the_next_call(
    llm: LLM, exception: type[BaseException]
) -> None:
    def fail(plan: Any) -> None:
        if plan.step == 2:
            raise exception

    executor(llm).hook = fail
    with pytest.raises(exception):
        llm.generate(["one", "dog"], LONG, use_tqdm=False)
    assert_idle(llm)
    executor(llm).hook = lambda plan: None
    assert texts(llm.generate(["€", "one"], LONG, use_tqdm=False)) == [ANSWERS["€"], ANSWERS["one"]]


def test_a_failing_progress_bar_or_prompt_iterator_leaves_nothing(llm: LLM) -> None:
    def broken_bar(**kwargs: Any) -> None:
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal"):
        llm.generate(["one"], LONG, use_tqdm=broken_bar)
    assert_idle(llm)

    def source() -> Iterator[str]:
        yield "one"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(llm.stream(source(), LONG))
    assert_idle(llm)


def test_every_eos_id_ends_an_output_without_its_text(make_llm: MakeLLM) -> None:
    with make_llm({"one": " two<s> three"}) as llm:
        (output,) = llm.generate("one", LONG, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == (" two", None)
        shown = SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=False)
        assert texts(llm.generate("one", shown, use_tqdm=False)) == [" two"]
        ignored = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop_token_ids=[1])
        (output,) = llm.generate("one", ignored, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == (" two three", 1)


def test_stop_strings_end_an_output(llm: LLM) -> None:
    stop = SamplingParams(temperature=0, max_tokens=64, stop=["ree", "tle ca"])
    one, dog = llm.generate(["one", "dog"], stop, use_tqdm=False)
    assert (one.outputs[0].text, one.outputs[0].stop_reason) == (" two th", "ree")
    assert (dog.outputs[0].text, dog.outputs[0].stop_reason) == (" and a lit", "tle ca")
    assert "ree" in byte_level().decode(one.outputs[0].token_ids)
    keep = dataclasses.replace(stop, include_stop_str_in_output=True)
    assert texts(llm.generate("one", keep, use_tqdm=False)) == [" two three"]


def test_a_stop_id_may_be_kept_in_the_text_also_while_streaming(llm: LLM) -> None:
    end = byte_level().encode(" three")[-1]
    params = SamplingParams(
        temperature=0, max_tokens=64, stop_token_ids=[end], include_stop_str_in_output=True
    )
    assert texts(llm.generate("one", params, use_tqdm=False)) == [" two three"]
    assert "".join(texts(llm.stream("one", params, kind="delta"))) == " two three"
    cut = dataclasses.replace(params, include_stop_str_in_output=False)
    (kept,) = texts(llm.generate("one", cut, use_tqdm=False))
    assert kept == byte_level().decode(byte_level().encode(" two three")[:-1])
    assert "".join(texts(llm.stream("one", cut, kind="delta"))) == kept


def test_an_ignored_eos_is_text_like_any_other(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=64, ignore_eos=True, skip_special_tokens=False
    )
    (output,) = llm.generate("nothing", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == "</s>" * 64
    assert "".join(texts(llm.stream("nothing", params, kind="delta"))) == "</s>" * 64


def test_cache_salt_and_bad_words_reach_the_engine(llm: LLM) -> None:
    seen: list[Any] = []
    executor(llm).hook = lambda plan: seen.extend(
        (s.request.cache_salt, s.request.bad_word_ids) for s in llm.engine.scheduler.running
    )
    prompt = {"prompt": "nothing", "cache_salt": "mine"}
    llm.generate(prompt, SamplingParams(bad_words=["dog"]), use_tqdm=False)
    assert seen == [("mine", bad_word_ids(byte_level(), ["dog"]))]


def test_followers_are_created_only_if_text_is_needed_early(llm: LLM) -> None:
    followers: list[object] = []

    def record(plan: Any) -> None:
        followers.extend(seq.follower for seq in llm.engine.scheduler.running)

    executor(llm).hook = record
    llm.generate("one", LONG, use_tqdm=False)
    assert set(followers) == {None}
    silent = dataclasses.replace(LONG, detokenize=False)
    for outputs in (llm.generate("one", silent, use_tqdm=False), llm.stream("one", silent)):
        assert texts(outputs) == [""]
    assert set(followers) == {None}
    llm.generate("one", SamplingParams(stop=["zzz"]), use_tqdm=False)
    assert set(followers) != {None}


def test_logprobs_have_vllms_structure(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("dog", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 3
    first = completion.logprobs[0]
    assert next(iter(first)) == completion.token_ids[0]
    assert first[completion.token_ids[0]].decoded_token == " and"
    assert completion.cumulative_logprob == pytest.approx(-1.5)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(d)) for d in output.prompt_logprobs[1:] if d] == ids("dog")[1:]
    (plain,) = llm.generate("dog", LONG, use_tqdm=False)
    assert (plain.outputs[0].logprobs, plain.prompt_logprobs) == (None, None)
    assert plain.outputs[0].cumulative_logprob is None


def test_n_completions_by_index_and_metrics(llm: LLM) -> None:
    (output,) = llm.generate("one", SamplingParams(n=3, max_tokens=64), use_tqdm=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert [o.text for o in output.outputs] == [" two three."] * 3
    times = output.metrics
    assert times.queued_s is not None
    assert times.prefill_s is not None
    assert times.ttft_s == pytest.approx(times.queued_s + times.prefill_s)
    assert times.e2e_s is not None
    assert times.itl_s is not None
    assert 0 <= times.queued_s <= times.ttft_s <= times.e2e_s


def test_no_params_means_the_models_generation_config(make_llm: MakeLLM) -> None:
    with make_llm(generation_defaults={"temperature": 0.6, "top_k": 20}) as llm:
        params = llm.default_sampling_params
        assert params == SamplingParams(temperature=0.6, top_k=20)
        seen: list[Any] = []
        executor(llm).hook = lambda plan: seen.extend(new.params for new in plan.admitted)
        llm.generate(["one", "dog"], use_tqdm=False)
        assert seen == [params, params]


def test_a_progress_bar_shows_requests_and_speed(llm: LLM) -> None:
    def call(prompts: Any, bar: Bar) -> Any:
        if isinstance(prompts, list):
            llm.generate(prompts, LONG, use_tqdm=bar, on_error="record")
        return list(llm.stream(prompts, LONG, use_tqdm=bar, on_error="record"))

    for prompts, total, count in ((["one", "dog", []], 2, 4), (iter(["one", "dog"]), None, 2)):
        bar = Bar()
        call(prompts, bar)
        assert (bar.total, bar.count, bar.is_closed) == (total, count, True)
        assert "output" in bar.text and "tok/s" in bar.text
        assert_idle(llm)


# --- chat -----------------------------------------------------------------------------------------


def test_chat_renders_one_or_many_conversations(make_llm: MakeLLM) -> None:
    prompt = "<|user|>go home</s><|assistant|>"
    with make_llm({prompt: "it is late."}) as llm:
        talk = [{"role": "user", "content": "go home"}]
        options: Any = {"chat_template": CHAT_TEMPLATE, "use_tqdm": False}
        (output,) = llm.chat(talk, LONG, **options)
        assert (output.prompt, output.outputs[0].text) == (prompt, "it is late.")
        assert output.prompt_token_ids == byte_level().encode(prompt, add_special_tokens=False)
        assert texts(llm.chat([talk, talk], LONG, **options)) == ["it is late."] * 2
        (bare,) = llm.chat(talk, LONG, add_generation_prompt=False, **options)
        assert bare.prompt == "<|user|>go home</s>"


# --- stream ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, ["three", "cat"]])
def test_deltas_add_up_to_what_generate_returns(llm: LLM, stop: list[str] | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, stop=stop, logprobs=0)
    expected = llm.generate(list(ANSWERS), params, use_tqdm=False)
    for i, final in enumerate(expected):
        text, tokens, logprobs = "", [], []
        for output in llm.stream(list(ANSWERS), params, kind="delta"):
            if output.index == i:
                text += output.outputs[0].text
                tokens += output.outputs[0].token_ids
                logprobs += output.outputs[0].logprobs or []
        assert (text, tokens, logprobs) == (
            final.outputs[0].text,
            final.outputs[0].token_ids,
            final.outputs[0].logprobs,
        )


def test_cumulative_outputs_only_grow_and_contain_whole_characters(llm: LLM) -> None:
    outputs = list(llm.stream("€", LONG, kind="cumulative"))
    shown = texts(outputs)
    assert shown[-1] == ANSWERS["€"]
    assert len(outputs) > 5
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
    assert "\ufffd" not in "".join(shown)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_streams_of_a_byte_fallback_tokenizer_keep_spaces(make_llm: MakeLLM) -> None:
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("the", add_special_tokens=False)
    with make_llm({"the": " dog 🙂 the."}, tokenizer=tokenizer) as llm:
        text = "".join(o.outputs[0].text for o in llm.stream([prompt], LONG, kind="delta"))
        assert texts(llm.generate([prompt], LONG, use_tqdm=False)) == [text]
        assert "\ufffd" not in text
        assert text.endswith("dog 🙂 the.")


def test_running_requests_continue_while_a_generator_pauses(make_llm: MakeLLM) -> None:
    """A PAUSE adds no prompt; while nothing runs, it ends the stream."""
    with make_llm(ANSWERS, max_num_seqs=4) as llm:
        finished: list[int] = []

        def source() -> Iterator[Any]:
            yield "dog"
            while not finished:
                yield PAUSE
            yield "one"
            while len(finished) < 2:
                yield PAUSE
            yield PAUSE
            raise AssertionError("read after the last PAUSE")

        for output in llm.stream(source(), LONG):
            assert output.outputs[0].text == ANSWERS[("dog", "one")[output.index]]
            finished.append(output.index)
        assert finished == [0, 1]


def test_closing_a_stream_aborts_the_rest(llm: LLM) -> None:
    stream = llm.stream(["one", "dog"], LONG, kind="delta")
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert_idle(llm)


def test_an_abandoned_stream_leaves_nothing_and_raises(llm: LLM) -> None:
    abandoned = llm.stream(["one", "dog"], LONG, kind="delta")
    next(abandoned)
    assert texts(llm.generate(["€"], LONG, use_tqdm=False)) == [ANSWERS["€"]]
    assert_idle(llm)
    with pytest.raises(NanoEngineError, match="ended by another call"):
        next(abandoned)


# --- lifecycle ------------------------------------------------------------------------------------


def test_close_is_final_and_idempotent(make_llm: MakeLLM) -> None:
    llm = make_llm(ANSWERS)
    run, stream = executor(llm), llm.stream("one", LONG, kind="delta")
    next(stream)
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    assert run.is_shut_down
    llm.close()
    for use in (lambda: llm.generate("one", use_tqdm=False), llm.stats, lambda: next(stream)):
        with pytest.raises(NanoEngineError, match="closed"):
            use()
    assert "closed" in repr(llm)


def test_without_a_tokenizer_prompts_and_outputs_are_ids(make_llm: MakeLLM) -> None:
    with make_llm(ANSWERS, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate(
            [ids("one")], dataclasses.replace(LONG, logprobs=0), use_tqdm=False
        )
        assert output.outputs[0].text == ""
        assert byte_level().decode(output.outputs[0].token_ids) == " two three."
        for prompt, params in (
            ("one", LONG),
            ([1], SamplingParams(stop=["x"])),
            ([1], SamplingParams(bad_words=["x"])),
        ):
            with pytest.raises(RequestError, match="skip_tokenizer_init"):
                llm.generate(prompt, params, use_tqdm=False)


def test_llm_is_a_class_before_heavy_modules_are_loaded() -> None:
    code = (
        "import inspect, pydoc, sys; from nanoengine import LLM;"
        "assert 'offline inference' in pydoc.render_doc(LLM) and inspect.isclass(LLM);"
        "assert list(inspect.signature(LLM).parameters) == ['model', 'options'];"
        "Mine = type('Mine', (LLM,), {}); assert isinstance(Mine.__new__(Mine), LLM);"
        "print(sorted({'torch', 'transformers', 'numba', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_pauses_while_an_llm_is_created(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    seen: list[bool] = []
    moves: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(moves.append, name))

    def load(llm: LLM) -> Tokenizer:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ConfigError("no such tokenizer")
        return byte_level()

    monkeypatch.setattr(LLM, "_load_tokenizer", load)
    (gc.enable if enabled else gc.disable)()
    try:
        with make_llm():
            assert gc.isenabled() == enabled
        with pytest.raises(ConfigError, match="no such tokenizer"):
            make_llm()
        assert gc.isenabled() == enabled
        assert seen == [False, False]
        assert moves == [], "objects frozen by the caller stay frozen"
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
        with make_llm():
            assert moves == ["freeze", "unfreeze"]
    finally:
        gc.enable()


def test_import_is_cheap_and_every_public_name_loads() -> None:
    code = (
        "import sys, nanoengine; assert nanoengine.__version__;"
        "nanoengine.SamplingParams, nanoengine.EngineConfig, nanoengine.RequestOutput;"
        "print(sorted({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    for name in nanoengine.__all__:
        assert getattr(nanoengine, name) is not None
    assert set(nanoengine.__all__) <= set(dir(nanoengine))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        nanoengine.LMM  # noqa: B018
