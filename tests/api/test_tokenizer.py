"""Detokenization and stop strings are exact for every kind of tokenizer, incremental or at once."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from nanoengine import SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.errors import ConfigError, ModelError, RequestError
from nanoengine.jobs.manifest import describe_engine
from nanoengine.settings.config import EngineConfig
from nanoengine.text import rendering
from nanoengine.text.end_tokens import bad_word_ids
from nanoengine.text.stream import MAX_OPEN_TOKENS, TextStream
from nanoengine.text.tokenizer import REPLACEMENT, Tokenizer
from tests.support.text_fixtures import CHAT_TEMPLATE, KINDS, byte_fallback, byte_level

kinds = pytest.mark.parametrize("kind", KINDS)
texts = st.text(max_size=40)


def raw_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def stream_text(
    stream: TextStream, token_ids: list[int], *, ends: bool = False
) -> tuple[str, list[str]]:
    """The final text, and the text after each token. With `ends`, the last id ends the output, so
    the engine does not append it."""
    shown = []
    for token_id in token_ids[: len(token_ids) - ends]:
        stop = stream.append(token_id)
        shown.append(stream.text)
        if stop is not None:
            break
    return stream.finish(token_ids if ends else None), shown


def assert_only_grows(shown: list[str], final: str) -> None:
    for before, after in itertools.pairwise([*shown, final]):
        assert after.startswith(before), (before, after)


@kinds
@given(data=st.data(), skip=st.booleans(), prompt=texts)
@settings(max_examples=400, deadline=None)
def test_streamed_text_equals_the_one_shot_decode(
    kind: str, data: st.DataObject, skip: bool, prompt: str
) -> None:
    """A model may sample any token: invalid bytes, incomplete characters, special tokens."""
    tokenizer = KINDS[kind]()
    bytes_or_any = st.one_of(
        st.integers(0, len(tokenizer.backend) - 1),
        st.sampled_from(sorted(tokenizer.byte_ids or range(100))),
        st.sampled_from(sorted(tokenizer.special_ids)),
    )
    words = texts.map(lambda text: raw_ids(tokenizer, text))
    ids = data.draw(words | st.lists(bytes_or_any, max_size=40))
    params = SamplingParams(skip_special_tokens=skip)
    prompt_ids = raw_ids(tokenizer, prompt)
    final, shown = stream_text(TextStream(tokenizer, params, prompt_token_ids=prompt_ids), ids)
    assert final == tokenizer.output_text(ids, params, prompt_token_ids=prompt_ids)
    assert_only_grows(shown, final)


BYTE_LEVEL_NAMES = {
    0x0A: "Ċ", 0x41: "A", 0xE2: "â", 0x82: "Ĥ", 0xAC: "¬", 0xFF: "ÿ", 0xF0: "ð",
}  # fmt: skip


@given(data=st.lists(st.sampled_from(sorted(BYTE_LEVEL_NAMES)), max_size=60))
@example([0xFF] * 4 + [0xE2, 0x82] + [0xFF] * 30)  # E2 82 is one invalid character, not two
@settings(max_examples=200, deadline=None)
def test_long_runs_of_invalid_bytes_are_exact_and_delayed_by_few_tokens(data: list[int]) -> None:
    tokenizer = byte_level()
    ids = tokenizer.backend.convert_tokens_to_ids([BYTE_LEVEL_NAMES[byte] for byte in data])
    stream = TextStream(tokenizer, SamplingParams(), prompt_token_ids=raw_ids(tokenizer, "a"))
    final, shown = stream_text(stream, ids)
    assert final == bytes(data).decode("utf-8", "replace")
    assert_only_grows(shown, final)
    for count, text in enumerate(shown, start=1):
        settled = bytes(data[: max(0, count - MAX_OPEN_TOKENS - 1)]).decode("utf-8", "replace")
        assert len(text) >= len(settled) - 1


def test_a_character_in_several_tokens_is_shown_when_complete() -> None:
    tokenizer = byte_fallback()
    ids = raw_ids(tokenizer, "a€")[-3:] + raw_ids(tokenizer, "a")
    _, shown = stream_text(TextStream(tokenizer, SamplingParams(), prompt_token_ids=ids), ids)
    assert shown == ["", "", "", "€ a"]


@kinds
def test_an_output_keeps_the_space_of_its_first_word(kind: str) -> None:
    tokenizer = KINDS[kind]()
    prompt, whole = raw_ids(tokenizer, "the"), raw_ids(tokenizer, "the dog")
    assert whole[: len(prompt)] == prompt
    text = tokenizer.output_text(whole[len(prompt) :], SamplingParams(), prompt_token_ids=prompt)
    assert text == " dog"


def test_an_output_at_the_start_of_a_text_has_no_leading_space() -> None:
    tokenizer = byte_fallback()
    ids, bos = raw_ids(tokenizer, "the dog"), [tokenizer.backend.bos_token_id]
    params = SamplingParams()
    assert tokenizer.output_text(ids, params, prompt_token_ids=bos) == "the dog"
    final, _ = stream_text(TextStream(tokenizer, params, prompt_token_ids=bos), ids)
    assert final == "the dog"


def run_stops(
    tokenizer: Tokenizer, text: str, **params: object
) -> tuple[str, int, str | None, list[str]]:
    """The text, the number of tokens, the stop reason, and the text after each token."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    stream = TextStream(tokenizer, sampling, prompt_token_ids=raw_ids(tokenizer, "a"))
    shown, reason, num_tokens = [], None, 0
    for token_id in raw_ids(tokenizer, text):
        reason, num_tokens = stream.append(token_id), num_tokens + 1
        shown.append(stream.text)
        if reason is not None:
            break
    return stream.finish(), num_tokens, reason, shown


def test_a_stop_string_across_several_tokens_ends_the_text() -> None:
    tokenizer = byte_level()
    text = "it is late, go home.\n\nUser: what"
    final, num_tokens, reason, shown = run_stops(tokenizer, text, stop=["\n\nUser:"])
    assert (final, reason) == ("it is late, go home.", "\n\nUser:")
    ids = raw_ids(tokenizer, text)
    assert "User:" in tokenizer.decode(ids[:num_tokens])
    assert "User:" not in tokenizer.decode(ids[: num_tokens - 1])
    assert_only_grows(shown, final)


def test_include_stop_str_in_output_keeps_exactly_the_match() -> None:
    final, _, reason, _ = run_stops(
        byte_level(), "go home.\n\nUser", stop=["me"], include_stop_str_in_output=True
    )
    assert (final, reason) == ("go home", "me")


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["g", "o"], "d", "o"),  # Both are in one token: the one that ends first is used.
        (["dog", "g", "og"], "", "dog"),  # Both end at the same character: the first in the list.
        (["og", "dog"], "d", "og"),
        (["cat", "dog"], "", "dog"),
    ],
)
def test_the_stop_string_that_ends_first_is_used_then_the_order_of_the_list(
    stop: list[str], expected: str, reason: str
) -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    (dog,) = tokenizer.backend.convert_tokens_to_ids(["dog"])
    assert stream.append(dog) == reason
    assert stream.finish() == expected


@kinds
@given(text=texts, stops=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_text_ends_at_the_first_prefix_that_completes_a_stop_string(
    kind: str, text: str, stops: list[str]
) -> None:
    tokenizer = KINDS[kind]()
    if any(REPLACEMENT in stop for stop in stops):
        return
    anchored = raw_ids(tokenizer, "a")
    ids = raw_ids(tokenizer, text)
    final, num_tokens, reason, shown = run_stops(tokenizer, text, stop=stops)
    assert_only_grows(shown, final)
    for count in range(1, len(ids) + 1):
        prefix = tokenizer.output_text(ids[:count], SamplingParams(), prompt_token_ids=anchored)
        hits = [(prefix.find(s) + len(s), i, s) for i, s in enumerate(stops) if s in prefix]
        if hits:
            end, _, stop = min(hits)
            assert (num_tokens, reason, final) == (count, stop, prefix[: end - len(stop)])
            return
    assert reason is None
    assert final == tokenizer.output_text(ids, SamplingParams(), prompt_token_ids=anchored)


def test_a_byte_token_of_a_newline_stops_immediately() -> None:
    final, num_tokens, reason, _ = run_stops(byte_fallback(), "a\na", stop=["\n"])
    assert (final, reason) == (" a", "\n")
    assert raw_ids(byte_fallback(), "a\na")[num_tokens - 1] in byte_fallback().byte_ids


def test_streamed_text_never_has_a_part_of_a_stop_string() -> None:
    final, _, _, shown = run_stops(byte_fallback(), "a dog. og", stop=["og!", "."])
    assert final == " a dog"
    assert all(not text.endswith(("o", "og")) for text in shown[:-1])


def test_stop_strings_before_min_tokens_are_ignored() -> None:
    tokenizer = byte_fallback()
    text = "dog dog dog dog"
    _, num_tokens, _, _ = run_stops(tokenizer, text, stop=["dog"])
    assert num_tokens == 1
    final, num_tokens, reason, _ = run_stops(tokenizer, text, stop=["dog"], min_tokens=3)
    assert (final, num_tokens, reason) == (" dog dog ", 3, "dog")


def test_the_text_of_eos_is_not_in_the_output() -> None:
    tokenizer = byte_level()
    eos = tokenizer.backend.eos_token_id
    ids = [*raw_ids(tokenizer, "go home."), eos]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        stream = TextStream(tokenizer, params, end_ids={eos})
        assert stream_text(stream, ids, ends=True)[0] == "go home."
        assert tokenizer.output_text(ids, params, end_ids={eos}) == "go home."


@pytest.mark.parametrize("skip", [True, False])
def test_an_end_id_before_min_tokens_is_decoded_like_other_tokens(skip: bool) -> None:
    """If a grammar is complete, only end ids are allowed; only the last id ends the output."""
    tokenizer = byte_level()
    eos = tokenizer.backend.eos_token_id
    ids = [*raw_ids(tokenizer, "go"), eos, eos, eos]
    params = SamplingParams(skip_special_tokens=skip, min_tokens=len(ids))
    stream = TextStream(tokenizer, params, end_ids={eos})
    expected = tokenizer.output_text(ids, params, end_ids={eos})
    assert stream_text(stream, ids, ends=True)[0] == expected
    assert expected == ("go" if skip else tokenizer.decode(ids[:-1], skip_special_tokens=False))


def test_the_text_of_a_stop_token_is_included_only_with_include_stop_str_in_output() -> None:
    tokenizer = byte_level()
    ids = raw_ids(tokenizer, "go home.")
    end = {ids[-1]}
    cut = tokenizer.decode(ids[:-1])
    for include, expected in ((False, cut), (True, "go home.")):
        params = SamplingParams(include_stop_str_in_output=include)
        stream = TextStream(tokenizer, params, end_ids=end)
        assert stream_text(stream, ids, ends=True)[0] == expected
        assert tokenizer.output_text(ids, params, end_ids=end) == expected


def test_special_tokens_that_are_not_skipped_decode_to_their_names() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.convert_tokens_to_ids("<|user|>"), *raw_ids(tokenizer, "go")]
    assert tokenizer.output_text(ids, SamplingParams()) == "go"
    assert tokenizer.output_text(ids, SamplingParams(skip_special_tokens=False)) == "<|user|>go"


def test_token_text_keeps_leading_spaces() -> None:
    tokenizer = byte_fallback()
    assert tokenizer.token_text(tokenizer.backend.convert_tokens_to_ids("▁the")) == " the"
    assert tokenizer.token_text(tokenizer.backend.eos_token_id) == "</s>"


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    tokenizer = byte_level()
    spellings = bad_word_ids(tokenizer, ["dog", "dog"])
    assert [tokenizer.decode(ids) for ids in spellings] == ["dog", " dog"]


def test_encode_rejects_lone_surrogates() -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        byte_level().encode("a\ud800b")


def test_a_regular_expression_that_fails_on_a_text_raises_an_error() -> None:
    """The library panics, and the class of panics is not a subclass of Exception."""
    raw = RawTokenizer.from_str(byte_level().definition())
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))
    with pytest.raises(RequestError, match=r"the tokenizer failed on the text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("ab")


def test_a_chat_template_is_rendered_or_an_error_says_that_it_is_missing() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "go home"}]
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat(messages)
    text = tokenizer.render_chat(messages, chat_template=CHAT_TEMPLATE)
    assert text == "<|user|>go home</s><|assistant|>"
    with pytest.raises(RequestError, match="refused"):
        tokenizer.render_chat(messages, chat_template="{{ raise_exception('no users') }}")


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = {
    "time, in Python": (LOOPS, r"did not end within 0\.3 s"),
    "time, in one call into C": ("{{ 9 ** (9 ** 9) }}", r"did not end within 0\.3 s"),
    "memory, in one call": (
        "{{ range(99999) | map('string') | join('x' * 99999) | length }}", "more than 1024 MiB"
    ),
    "memory, in steps": (
        "{% set n = namespace(s='0123456789') %}"
        "{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more than 1024 MiB"
    ),
    "a text": ("{{ 'x' * 99999999 }}", "99,999,999 characters of at most 67,108,864"),
}  # fmt: skip


@pytest.mark.parametrize("what", TOO_MUCH)
def test_time_and_memory_of_a_chat_template_are_limited(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, message = TOO_MUCH[what]
    monkeypatch.setattr(rendering, "RENDER_S", 0.3 if what.startswith("time") else 30.0)
    tokenizer, messages = byte_level(), [{"role": "user", "content": "go home"}]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=f"the chat template refused .*{message}"):
        tokenizer.render_chat(messages, chat_template=template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000, "[KiB]"
    monkeypatch.setattr(tokenizer.backend, "chat_template", CHAT_TEMPLATE)
    assert tokenizer.render_chat(messages) == "<|user|>go home</s><|assistant|>"


def test_a_chat_template_has_the_same_variables_as_in_transformers() -> None:
    def weather(city: str) -> str:
        """Weather.

        Args:
            city: the city.
        """
        return city

    tokenizer, talk = byte_level(), [{"role": "user", "content": "é\ud83d"}]
    template = (
        "{{ bos_token }} {{ messages }} {{ tools }} {{ a[2] }} {{ messages[0].role | tojson }}"
    )
    options: dict[str, Any] = {"chat_template": template, "tools": [weather, {"name": "x"}]}
    expected = tokenizer.backend.apply_chat_template(talk, tokenize=False, a={2: 3}, **options)
    assert tokenizer.render_chat(talk, a={2: 3}, **options) == expected
    assert "the city" in expected


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # since Python 3.12
def test_a_renderer_works_after_interrupts_and_after_its_process_ended() -> None:
    renderer = rendering.Renderer("row")

    def interrupted() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        renderer.render(LOOPS, {})

    assert renderer.render("a{{ x }}", {"x": 1}) == "a1"
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert renderer.render("a{{ x }}", {"x": 2}) == "a2"
    threading.Timer(0.2, renderer.begin().kill).start()
    with pytest.raises(ValueError, match="exited with -9"):
        renderer.render(LOOPS, {})
    assert renderer.render("a{{ x }}", {"x": 3}) == "a3"
    process = renderer.begin()
    process.kill()
    process.wait()
    assert renderer.render("a{{ x }}", {"x": 4}) == "a4"
    if (child := os.fork()) == 0:
        os._exit(renderer.render("{{ x }}", {"x": 5}) != "5")
    assert os.waitpid(child, 0)[1] == 0
    assert renderer.render("a{{ x }}", {"x": 6}) == "a6"


@pytest.mark.parametrize("normalized", [False, True])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_special_tokens_that_are_marked_as_normalized_are_skipped(
    normalized: bool, data: st.DataObject
) -> None:
    """As in raw files of Llama 2; the library does not skip such tokens."""
    raw = RawTokenizer.from_str(byte_fallback().backend.backend_tokenizer.to_str())
    raw.add_special_tokens(
        [AddedToken(name, special=True, normalized=normalized) for name in ("<s>", "</s>", "<unk>")]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))
    dog, eos = tokenizer.backend.convert_tokens_to_ids(["▁dog", "</s>"])
    ids = data.draw(st.just([dog, eos, dog]) | st.lists(st.sampled_from([0, 1, eos, dog, dog + 1])))
    prompt = data.draw(st.sampled_from([[], [dog]]))
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        final, _ = stream_text(TextStream(tokenizer, params, prompt_token_ids=prompt), ids)
        assert final == tokenizer.output_text(ids, params, prompt_token_ids=prompt)
        assert not skip or "</s>" not in final


def test_a_checkpoint_without_tokenizer_files_is_rejected(tmp_path: Path) -> None:
    for model_type in ("qwen3", "qwen2", "gemma3_text", "llama", "mistral"):
        directory = tmp_path / model_type
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match="skip_tokenizer_init=True"):
            Tokenizer.load(str(directory))
        (directory / "tokenizer_config.json").write_text("{}")
        with pytest.raises(ConfigError, match="skip_tokenizer_init=True"):
            Tokenizer.load(str(directory))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "chat_template.jinja",
                                  "config.json", "added_tokens.json"])  # fmt: skip
def test_a_fifo_among_the_tokenizer_files_does_not_block(name: str, tmp_path: Path) -> None:
    byte_level().backend.save_pretrained(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                                  "merges.txt"])  # fmt: skip
def test_an_error_names_a_git_lfs_pointer_among_the_tokenizer_files(
    name: str, tmp_path: Path
) -> None:
    byte_level().backend.save_pretrained(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=f"{name} can't be read: it is a Git LFS pointer"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\xef\xbb\xbf{"model_type": "llama"}', "config.json is not valid.*byte order mark"),
        (
            b'{"architectures": ["LlamaForCausalLM"], "hidden_size": "big"}',
            "config.json: hidden_size must be an integer",
        ),
        (b'{"model_type": "llama",}', "config.json is not valid JSON: .*line 1 column 24"),
    ],
)
def test_an_invalid_config_raises_an_error_about_the_config(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.of(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", ["[" * 200_000, '{"a": ' * 200_000, "5", "\xff", ""])
def test_a_damaged_tokenizer_file_is_rejected(name: str, content: str, tmp_path: Path) -> None:
    byte_level().backend.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="skip_tokenizer_init=True"):
        Tokenizer.load(str(tmp_path))


def test_a_tokenizer_in_the_home_folder_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    byte_level().backend.save_pretrained(tmp_path / "mine")
    tokenizer = Tokenizer.load("~/mine")
    assert raw_ids(tokenizer, "a cat") == raw_ids(byte_level(), "a cat")
    config = EngineConfig(model=str(demo_model_path()), tokenizer="~/mine")
    assert "tokenizer.json" in describe_engine(config, "demo")["tokenizer"]


@pytest.mark.parametrize("name", ["/no/such", "./no", "~/no", "no/", "a/b/c", "tokenizer.json/"])
def test_a_name_that_is_not_a_hub_id_raises_an_error_about_a_directory(name: str) -> None:
    """Regression: the message was about the characters that are allowed in a hub id."""
    with pytest.raises(
        ConfigError, match=r"(?s)is not an existing directory, .*skip_tokenizer_init"
    ):
        Tokenizer.load(name)
