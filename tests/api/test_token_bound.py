"""The lower bound of tokens never exceeds their number, and is high for very long texts."""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from nanoengine.errors import CapacityError, PromptTooLongError
from nanoengine.settings.params import SamplingParams
from nanoengine.text.token_bound import INERT, TokenBound
from nanoengine.text.tokenizer import Tokenizer
from tests.support.fake_llm import MakeLLM
from tests.support.text_fixtures import KINDS, byte_fallback, byte_level


def changed(tokenizer: Tokenizer, *added: dict[str, Any], **parts: Any) -> Tokenizer:
    """A copy of a tokenizer with other parts and additional tokens."""
    spec = json.loads(tokenizer.definition()) | parts
    token = {"special": False, "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False}
    first = max((each["id"] for each in spec["added_tokens"]), default=0)
    first = max(first, *spec["model"]["vocab"].values()) + 1
    spec["added_tokens"] += [{"id": first + i, **token, **new} for i, new in enumerate(added)]
    raw = RawTokenizer.from_str(json.dumps(spec))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))


NFC = {"type": "NFC"}
LONGER = {"type": "Replace", "pattern": {"String": "ab"}, "content": "dog"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
LETTERS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": False}
TOKENIZERS = {
    **{name: make() for name, make in KINDS.items()},
    "nfc": changed(byte_level(), {"content": "<a>"}, normalizer=NFC),
    "strips": changed(
        byte_level(),
        {"content": "<a>", "lstrip": True},
        {"content": "dogdogdogdog", "rstrip": True},
    ),
    "normalized": changed(
        byte_fallback(),
        {"content": "a b \u212b", "normalized": True},
        {"content": "\u212a" * 8, "normalized": True},
        normalizer={"type": "Sequence", "normalizers": [NFC, LONGER, PREPEND, BLANKS]},
    ),
    "longer": changed(
        byte_fallback(),
        normalizer={"type": "Sequence", "normalizers": [LONGER, PREPEND, BLANKS]},
    ),
    "digits": changed(
        byte_level(),
        {"content": "\n\n\n"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS, LETTERS]},
    ),
}  # fmt: skip

PIECES = [
    *"abdghnotux \n\t0.<>▁éÅ가각你あЖй🙂",
    *"\u0301\u0323\u0327\u0344\u1100\u1161\u11a8\u3099\u212b\u212a\u00a0\u3000\u0306",
    *("the", "dog", " dog", "dogdogdogdog", "<a>", "ab", "a b", "a b Å", "  ", "</s>", "\n\n"),
    *("<tool>", "時", "<0x41>", "Once upon a time", "KKKKKKKK", " " * 99 + "<a>"),
    *("\u1100\u1161", "e\u0301"),
]


BOUNDS = {name: TokenBound(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def is_bound(name: str, text: str) -> bool:
    """Whether a text has at least as many tokens as the bound."""
    return BOUNDS[name].lower_bound(text) <= len(
        TOKENIZERS[name].encode(text, add_special_tokens=False)
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_no_text_has_fewer_tokens_than_the_bound(name: str, pieces: list[str]) -> None:
    assert is_bound(name, "".join(pieces))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_repeated_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    assert all(is_bound(name, piece * times) for piece in PIECES for times in (1, 9))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bound_of_long_texts_is_high(name: str) -> None:
    """The longest tokens have 16 bytes; four normalizers may replace a character by 81."""
    divisor = 3000 if name == "normalized" else 40
    for text in ("x" * 10_000, "the dog and the cat " * 500, "你好" * 5000):
        assert BOUNDS[name].lower_bound(text) >= len(text) // divisor


REMOVED = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "x"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "xx"}, "content": "x"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVED, LETTERS]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {"model": {"type": "WordLevel", "vocab": {"x": 0, "<unk>": 1}, "unk_token": "<unk>"}},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(parts: dict[str, Any]) -> None:
    assert TokenBound(changed(byte_level(), **parts)).lower_bound("x" * 1000) == 0


def test_a_vocabulary_without_byte_tokens_or_with_affixes_has_no_bound() -> None:
    spec = json.loads(byte_fallback().definition())
    for change in ({"byte_fallback": False}, {"end_of_word_suffix": "</w>"}):
        model = copy.deepcopy(spec["model"]) | change
        assert TokenBound(changed(byte_fallback(), model=model)).lower_bound("x" * 1000) == 0


def test_nfc_does_not_change_the_inert_ranges() -> None:
    """NFC changes none of these characters, and composes none with the character before it."""
    inert = re.compile(f"[{INERT}]")
    chars = [c for c in map(chr, range(0x110000)) if inert.match(c)]
    assert all(unicodedata.normalize("NFC", c) == c and not unicodedata.combining(c) for c in chars)
    parts = (unicodedata.decomposition(chr(c)).split() for c in range(0x110000))
    seconds = {chr(int(two[1], 16)) for two in parts if len(two) == 2 and "<" not in two[0]}
    assert seconds.isdisjoint(chars)
    assert not inert.search("".join(map(chr, range(0x1161, 0x11C3))))  # Hangul, by arithmetic


# --- use of the bound ----------------------------------------------------------------------

LONG = "the dog " * 10_000


def test_a_prompt_that_is_far_too_long_is_not_encoded(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a text of 15 MB was rejected only after 54 s and with 4.2 GiB."""
    llm = make_llm({"one": "two"})
    encode, lengths = Tokenizer.encode, []

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    for prompt in (LONG, {"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}):
        if isinstance(prompt, dict) and "messages" in prompt:
            prompt["chat_template"] = "{{ messages[0]['content'] }}"
        with pytest.raises(PromptTooLongError, match=r"prompt 0: the prompt has at least \d+ tok"):
            llm.generate([prompt], SamplingParams(), use_tqdm=False)
        first, second = llm.generate(["one", prompt], on_error="record", use_tqdm=False)
        assert first.outputs[0].text == "two"
        assert second.error is not None and "shorten it, or raise max_model_len" in second.error
    assert max(lengths) < 100


def test_a_long_prompt_that_fits_is_encoded(make_llm: MakeLLM) -> None:
    llm = make_llm({}, max_model_len=10**6, num_blocks=10_000)
    (output,) = llm.generate([LONG], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.prompt_token_ids) == len(byte_level().encode(LONG))
    small = make_llm({}, max_model_len=10**6)
    with pytest.raises(CapacityError, match=r"the prompt of at least \d+ tokens needs \d+ KV blo"):
        small.generate([LONG], use_tqdm=False)
