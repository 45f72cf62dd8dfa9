"""Tokenizers from GGUF metadata equal their source; invalid metadata is rejected."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import GemmaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from nanoengine import SamplingParams
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings.config import EngineConfig
from nanoengine.text.gguf_tokenizer import NO_ID, PRE_TOKENIZERS, make_tokenizer
from nanoengine.text.load_tokenizer import find_chat_template
from nanoengine.text.stream import TextStream
from nanoengine.text.tokenizer import Tokenizer
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_fallback, byte_level

Metadata = dict[str, Any]

TALK = [{"role": "user", "content": "go home"}, {"role": "assistant", "content": "it is late"}]

PIECES = [
    "<s>", "</s>", "<|user|>", "<tool>", "<unk>", "<0x41>", " ", "  ", "▁", "the dog", "\r\n",
    "\n\n", "I've", "we'LL", "3.141", "٣½", "e\u0301", "€🙂", "👩\u200d👩\u200d👧", "\x00",
    "\ufffd", "\t",
]  # fmt: skip

TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def to_metadata(raw: RawTokenizer, **changes: Any) -> Metadata:
    """Converts the vocabulary of a tokenizer.json to metadata, and adds two unused tokens."""
    spec = json.loads(raw.to_str())
    ids = raw.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{i}]" for i in range(len(ids) + 2)]
    for token, i in ids.items():
        tokens[i] = token
    added = {one["id"]: 2 if one["content"] == "<unk>" else 4 - one["special"] for one in
             spec["added_tokens"]}  # fmt: skip
    types = [6 if token[:3] == "<0x" else 1 for token in tokens[:-2]] + [5, 5]
    for i, kind in added.items():
        types[i] = kind
    merges = [" ".join(pair) for pair in spec["model"]["merges"]]
    values = {"tokens": tokens, "token_type": types, "merges": merges, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def byte_keys(**changes: Any) -> Metadata:
    raw = byte_level().backend.backend_tokenizer
    return to_metadata(raw, **{"model": "gpt2", "pre": "gpt-2", "eos_token_id": 1, **changes})


def score_keys(**changes: Any) -> Metadata:
    raw = byte_fallback().backend.backend_tokenizer
    scores = [-float(i) for i in range(raw.get_vocab_size() + 2)]
    return to_metadata(
        raw,
        **{"model": "llama", "merges": None, "scores": scores, "add_bos_token": False, **changes},
    )


def gemma_keys(**changes: Any) -> Metadata:
    raw = byte_fallback().backend.backend_tokenizer
    return to_metadata(
        raw, **{"model": "gemma4", "add_bos_token": False, "bos_token_id": 1, **changes}
    )


def gemma() -> Tokenizer:
    """The same vocabulary in transformers' tokenizer class of Gemma."""
    model = json.loads(byte_fallback().backend.backend_tokenizer.to_str())["model"]
    tokens = {"pad_token": "</s>", "eos_token": "</s>", "bos_token": "<s>", "mask_token": "<s>"}
    merges = [tuple(pair) for pair in model["merges"]]
    return Tokenizer(GemmaTokenizer(vocab=model["vocab"], merges=merges, **tokens))


def write(path: Path, metadata: Metadata) -> Path:
    """Writes a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(metadata: Metadata) -> Tokenizer:
    return Tokenizer(make_tokenizer(metadata, Path("m.gguf")))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Per kind the tokenizer from a GGUF file, and its source."""
    folder = tmp_path_factory.mktemp("gguf")
    return {
        "byte_level": (
            Tokenizer.load(str(write(folder / "a.gguf", byte_keys(bos_token_id=0)))),
            byte_level(),
        ),
        "byte_fallback": (
            Tokenizer.load(str(write(folder / "b.gguf", score_keys()))),
            byte_fallback(),
        ),
        "gemma": (Tokenizer.load(str(write(folder / "c.gguf", gemma_keys()))), gemma()),
    }


kinds = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma"])


@kinds
@given(text=TEXTS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_ids_and_texts_equal_the_source(pairs, kind, text, data) -> None:  # type: ignore[no-untyped-def]
    ours, source = pairs[kind]
    ids = ours.encode(text)
    assert ids == source.encode(text)
    ids += data.draw(st.lists(st.integers(0, len(source.backend) - 1), max_size=8))
    for skip in (True, False):
        for anchored in (True, False):
            options = {"skip_special_tokens": skip, "anchored": anchored}
            assert ours.decode(ids, **options) == source.decode(ids, **options)
    stream = TextStream(ours, SamplingParams())
    for token_id in ids:
        stream.append(token_id)
    assert stream.finish() == source.output_text(ids, SamplingParams())


@kinds
def test_properties_of_tokens_equal_the_source(pairs, kind) -> None:  # type: ignore[no-untyped-def]
    ours, source = pairs[kind]
    for name in ("special_ids", "byte_ids", "anchor"):
        assert getattr(ours, name) == getattr(source, name), name
    assert ours.special_ids
    grammar, expected = (json.loads(one.definition()) for one in (ours, source))
    assert (
        grammar["model"]["vocab"].items()
        <= expected["model"]["vocab"].items()
        | {one["content"]: one["id"] for one in expected["added_tokens"]}.items()
    )


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_expressions_equal_the_expressions_of_transformers(pre: str) -> None:
    assert list(PRE_TOKENIZERS[pre].splits) == [GGUF_PRE_TOKENIZER_SPLITS[pre]]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "I ' LL Ġsay Ġ Ġ12345 . xY 's ĊĊ ĉ x"),
        ("smollm", "I ' LL Ġsay ĠĠ 1 2 3 4 5 . xY 's ĊĊ ĉ x"),
        ("llama-bpe", "I 'LL Ġsay Ġ Ġ 123 45 .xY 's ĊĊ ĉx"),
        ("gpt-4o", "I'LL Ġsay Ġ Ġ 123 45 .x Y's ĊĊ ĉx"),
        ("tekken", "I 'LL Ġsay Ġ Ġ 1 2 3 4 5 .x Y 's ĊĊ ĉx"),
        ("deepseek-coder", "I ' LL Ġsay ĠĠ 1 2 3 4 5 . xY ' s Ċ Ċ ĉx"),
        ("deepseek-v3", "I 'LL Ġsay ĠĠ 123 45 .xY 's ĊĊ ĉx"),
        ("seed-coder", "I 'LL Ġsay Ġ Ġ 1 2 3 4 5 .xY 's ĊĊ ĉx"),
        ("default", "I ' LL Ġsay Ġ Ġ 123 45 . xY ' s ĊĊ ĉ x"),
    ],
)
def test_text_is_split_into_words(pre: str, words: str) -> None:
    """The expected words follow the rules of llama.cpp with the same names."""
    raw = make_tokenizer(byte_keys(pre=pre, bos_token_id=0), Path("m.gguf")).backend_tokenizer
    found = raw.pre_tokenizer.pre_tokenize_str("I'LL say  12345.xY's\n\n\tx")
    assert [word for word, _ in found] == words.split()


SCRIPTS = "aB's c d  1234567\u00a0你好かなไทยaລາວb한국ㄅc。a/\n\n x      y"


WORDS_OF_SCRIPTS = {
    "starcoder": "aB|'s| c| d|  |1|2|3|4|5|6|7|\u00a0|你好かなไทยaລາວb한국ㄅc|。|a|/|"
    "\n\n| x|     | y",
    "viking": "aB's| c| d| | |1|2|3|4|5|6|7|\u00a0|你好かなไทยaລາວb한국ㄅc|。|a/|\n\n| x|     | y",
    "hunyuan": "aB|'s| c| d| | |1|2|3|4|5|6|7|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/\n\n| x|     | y",
    "falcon-h1": "aB|'s| c| d| | |123|456|7|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/\n\n| x|     | y",
    "minicpm5": "aB|'s| c| d|  |123|456|7|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/\n\n| x|     | y",
    "tiny_aya": "a|B's| c| d|  |1|234|567|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/\n\n| x|     | y",
    "kimi-k2": "a|B's| c| d| | |123|456|7|\u00a0|你好|かなไทยaລາວb한국ㄅc|。a|/\n\n| x|     | y",
    "exaone-moe": "aB|'s| c d| | |1|2|3|4|5|6|7|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/"
    "\n|\n| x|     | y",
    "afmoe": "aB|'s| c| d|  |1|234|567|\u00a0|你好かな|ไทย|a|ລາວ|b|한국|ㄅc|。|a|/\n\n| x|     | y",
    "laguna": "aB|'s| c| d| | |1|2|3|4|5|6|7|\u00a0你好かなไทยaລາວb한국ㄅc|。a|/|\n\n| x|     | y",
    "deepseek-llm": "aB|'|s| c| d|  |1|2|3|4|5|6|7|\u00a0|你好かなไทย|a|ລາວ|b|한국ㄅ|c|。|a|/|\n"
    "|\n| x|     | y",
}  # fmt: skip


@pytest.mark.parametrize(("pre", "words"), WORDS_OF_SCRIPTS.items())
def test_text_of_many_scripts_is_split_into_words(pre: str, words: str) -> None:
    """The expected words are computed by Python's `regex` with the published expressions."""
    raw = make_tokenizer(byte_keys(pre=pre, bos_token_id=0), Path("m.gguf")).backend_tokenizer
    found = [SCRIPTS[a:b] for _, (a, b) in raw.pre_tokenizer.pre_tokenize_str(SCRIPTS)]
    assert found == words.split("|")


def split(text: str, *expressions: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in expressions]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "published"),
    [
        (
            "afmoe",
            [
                r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
                r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
                r"\A\p{Nd}{3}|\G\p{Nd}{3}",
            ],
        ),
        ("tiny_aya", [r"\d{1,3}(?=(?:\d{3})*\b)"]),
    ],
)
def test_digits_are_grouped_from_the_right_as_by_the_published_expressions(
    pre: str, published: list[str]
) -> None:
    draw = Random(0)
    parts = ["1", "23", "4567", "٣", "½", "a", "_", " ", ".", "你", "\n", "8" * 511]
    for _ in range(500):
        text = "".join(draw.choices(parts, k=draw.randint(1, 12)))
        assert split(text, PRE_TOKENIZERS[pre].splits[0]) == split(text, *published), text


def test_grouping_digits_from_the_right_takes_linear_time() -> None:
    for pre in ("afmoe", "tiny_aya"):
        assert len(split("1" * 300_000, PRE_TOKENIZERS[pre].splits[0])) == 100_000


def test_letters_of_deepseek_equal_the_letters_in_its_tokenizer_json() -> None:
    """Source: the second expression in DeepSeek-LLM's tokenizer.json, as ranges of code points."""
    published = """
        41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386
        388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba
        1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57
        1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb
        1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d
        212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3
        a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a
        ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df
        1e900-1e943
    """
    ranges = [one.split("-") for one in published.split()]
    letters = {chr(i) for one in ranges for i in range(int(one[0], 16), int(one[-1], 16) + 1)}
    only = pre_tokenizers.Split(
        Regex(PRE_TOKENIZERS["deepseek-llm"].splits[1][3:]), "removed", invert=True
    )
    codes = [*range(1, 0xD800), *range(0xE000, 0x110000)]
    every = "".join(map(chr, codes))
    found = {c for i in range(0, len(every), 4096) for c in _letters(only, every[i : i + 4096])}
    assert found == letters


def _letters(only: pre_tokenizers.Split, text: str) -> str:
    return "".join(word for word, _ in only.pre_tokenize_str(text))


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenization_keeps_the_whole_text(pre: str) -> None:
    tokenizer = load(byte_keys(pre=pre, add_bos_token=False))
    text = "I'LL  say 1234567,\r\n\n \t½ naïve 你好 ไทย हिन्दी \U0001f642... x=f(y);  \n"
    assert tokenizer.decode(tokenizer.encode(text), anchored=False) == text
    composed = tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert composed == PRE_TOKENIZERS[pre].nfc


def test_with_ignore_merges_a_word_in_the_vocabulary_is_one_token() -> None:
    keys = byte_keys(merges=[], bos_token_id=0)
    token_id = keys["tokenizer.ggml.tokens"].index("Ġthe")
    for pre, ids in (("gpt-2", 4), ("llama-bpe", 1), ("kimi-k2", 1)):
        found = load(keys | {"tokenizer.ggml.pre": pre}).encode(" the", add_special_tokens=False)
        assert len(found) == ids and (ids > 1 or found == [token_id])


def test_the_first_of_two_equal_merges_is_used() -> None:
    """As in llama.cpp."""
    tokens = [*"abc", "ab", "bc"]
    keys = byte_keys(tokens=tokens, token_type=[1] * 5, eos_token_id=None)
    for merges, ids in (["a b", "b c", "a b"], [3, 2]), (["b c", "a b", "b c"], [0, 4]):
        assert load(keys | {"tokenizer.ggml.merges": merges}).encode("abc") == ids


def test_scores_determine_the_order_of_merges() -> None:
    """Compared with sentencepiece's algorithm: merge the best pair until no pair is a token."""
    draw = Random(0)
    # Why no repeated letters: the library can't rank two merges with the same result equally.
    longer = ["".join(draw.sample("abcde▁", draw.randint(2, 4))) for _ in range(150)]
    tokens = list(dict.fromkeys(["<unk>", *"abcde▁", *longer]))
    scores = {token: draw.uniform(-9, 9) for token in tokens}
    keys = {
        "model": "llama", "tokens": tokens, "token_type": [2] + [1] * (len(tokens) - 1),
        "scores": list(scores.values()), "add_space_prefix": False, "add_bos_token": False,
    }  # fmt: skip
    ours = load({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    for text in ("".join(draw.choices("abcde ", k=15)) for _ in range(300)):
        parts = list(text.replace(" ", "▁"))
        while True:
            both = enumerate(a + b for a, b in itertools.pairwise(parts))
            pairs = [(scores[pair], -i) for i, pair in both if pair in scores]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert ours.encode(text) == [tokens.index(part) for part in parts], text
    assert ours.encode("a你好b") == [tokens.index("a"), 0, tokens.index("b")]


def test_add_space_prefix_determines_whether_a_space_is_prepended() -> None:
    prefixed, plain = load(score_keys()), load(score_keys(add_space_prefix=False))
    for text in ("the dog", " the dog", "<s>the dog"):
        ids = prefixed.encode(text)
        assert ids == byte_fallback().encode(text)
        assert plain.encode(text.replace("the", " the", 1)) == ids
        assert plain.decode(plain.encode(text), anchored=False) == text.removeprefix("<s>")


def test_user_defined_tokens_of_spaces_are_not_split() -> None:
    for spaces in ("  ", "▁▁"):  # as newer and older tools write it
        keys = score_keys(add_space_prefix=False)
        keys["tokenizer.ggml.tokens"][-2:] = [spaces, "\n\n"]
        keys["tokenizer.ggml.token_type"][-2:] = [4, 4]
        tokenizer, last = load(keys), len(keys["tokenizer.ggml.tokens"]) - 1
        ids = tokenizer.encode("a  e\n\n")
        assert ids[1] == last - 1 and ids[-1] == last
        assert tokenizer.decode(ids) == "a  e\n\n"


@pytest.mark.parametrize(
    ("keys", "first", "last"),
    [
        ({"model": "gpt2", "bos_token_id": 0}, [], []),
        ({"model": "gpt2", "bos_token_id": 0, "pre": "llama-bpe"}, [0], []),
        ({"model": "gpt2", "bos_token_id": 0, "pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"model": "gpt2", "bos_token_id": 0, "add_bos_token": True}, [0], []),
        ({"model": "gpt2", "eos_token_id": 1, "add_eos_token": True}, [], [1]),
        ({"model": "llama", "bos_token_id": 1, "add_bos_token": None}, [1], []),
        ({"model": "gemma4", "add_bos_token": None}, [1], []),
        ({"model": "gemma4"}, [], []),
        ({"model": "llama", "bos_token_id": 1, "add_bos_token": True, "add_eos_token": True,
          "eos_token_id": 2}, [1], [2]),
    ],
)  # fmt: skip
def test_bos_and_eos_are_added_by_the_keys_or_defaults_of_the_file(
    keys: dict[str, Any], first: list[int], last: list[int]
) -> None:
    kind = {"gpt2": byte_keys, "llama": score_keys, "gemma4": gemma_keys}[keys["model"]]
    tokenizer = load(kind(**keys))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [*first, *plain, *last]


def test_tokens_of_phi3_strip_the_spaces_after_them() -> None:
    keys = score_keys(add_space_prefix=False) | {"general.architecture": "phi3"}
    tokenizer = load(keys)
    assert tokenizer.encode("</s> \n the") == tokenizer.encode("</s>the")
    assert tokenizer.encode("<s> the") != tokenizer.encode("<s>the")


def test_a_normal_token_with_a_role_is_not_special() -> None:
    keys = byte_keys(bos_token_id=0, padding_token_id=5, unknown_token_id=6)
    tokenizer = load(keys)
    assert 5 not in tokenizer.special_ids
    assert tokenizer.backend.pad_token is None and tokenizer.backend.unk_token is None
    assert load(byte_keys(bos_token_id=NO_ID)).backend.bos_token is None


def test_unused_and_empty_tokens_decode_to_no_text() -> None:
    keys = byte_keys()
    keys["tokenizer.ggml.tokens"] += ["", ""]
    keys["tokenizer.ggml.tokens"][-3] = "Ġthe"
    keys["tokenizer.ggml.token_type"] += [1, 4]
    tokenizer, last = load(keys), len(keys["tokenizer.ggml.tokens"]) - 3
    assert tokenizer.decode([last, last + 1, last + 2]) == ""
    assert last not in tokenizer.encode(" the the")


def test_chat_templates_of_the_file_are_rendered(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    keys = byte_keys(bos_token_id=0) | {key: "{{ bos_token }}" + CHAT_TEMPLATE}
    keys |= {f"{key}.tool_use": "{{ tools[0]['name'] }}", f"{key}s": ["tool_use"]}
    path = str(write(tmp_path / "m.gguf", keys))
    tokenizer = Tokenizer.load(path)
    for other in (None, path, str(tmp_path)):
        assert find_chat_template(EngineConfig(model=path, tokenizer=other)) == keys[key]
    talk = "<s><|user|>go home</s><|assistant|>it is late</s>"
    assert tokenizer.render_chat(TALK, add_generation_prompt=False) == talk
    assert tokenizer.render_chat(TALK, tools=[{"name": "clock"}]) == "clock"
    for text in (talk, " naïve  café<tool>"):
        assert tokenizer.backend(text)["input_ids"] == tokenizer.encode(text)
    assert tokenizer.backend.name_or_path == str(tmp_path / "m.gguf")
    del keys[f"{key}.tool_use"]
    assert load(keys).render_chat(TALK, add_generation_prompt=False) == talk
    with pytest.raises(RequestError, match="no chat template"):
        load(byte_keys()).render_chat(TALK)


INVALID: dict[str, tuple[Callable[[], Metadata], str]] = {
    "no tokenizer": (lambda: {}, "tokenizer.ggml.tokens is missing"),
    "no model": (lambda: byte_keys(model=None), "ggml.model is missing"),
    "another model": (lambda: byte_keys(model="t5"), "is 't5'; supported: gpt2, llama, gemma4"),
    "no pre-tokenization": (lambda: byte_keys(pre=None), "ggml.pre is missing"),
    "an unknown pre": (lambda: byte_keys(pre="bloom"), "'bloom'; supported: .* and [0-9]+ more"),
    "no merges": (lambda: byte_keys(merges=None), "ggml.merges is missing"),
    "no merges for gemma4": (lambda: gemma_keys(merges=None), "ggml.merges is missing"),
    "half a merge": (lambda: byte_keys(merges=["Ġthe"]), "'Ġthe', which is not a pair"),
    "a merge of unknown tokens": (lambda: byte_keys(merges=["Ġq zz"]), "does not match.*Ġq"),
    "tokens that are numbers": (lambda: byte_keys(tokens=[1, 2]), "tokens.*a string"),
    "no tokens": (lambda: byte_keys(tokens=[], token_type=[]), "one per token, and at least one"),
    "too few types": (lambda: byte_keys(token_type=[1]), "token_type must have .* one per token"),
    "no types": (lambda: byte_keys(token_type=None), "token_type must have .* one per token"),
    "an unknown type": (
        lambda: byte_keys(tokens=["a", "b"], token_type=[1, 9]), "has \\[9\\]; supported: 1 to 6",
    ),
    "two tokens of one text": (
        lambda: byte_keys(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "token twice: \\['a'\\]",
    ),
    "an id that is too large": (
        lambda: byte_keys(add_bos_token=True, bos_token_id=9999), "bos_token_id is 9999; .* from 0",
    ),
    "a negative id": (lambda: byte_keys(eos_token_id=-2), "eos_token_id is -2"),
    "an id that is text": (lambda: byte_keys(eos_token_id="</s>"), "must be an integer"),
    "a missing BOS that is added": (
        lambda: byte_keys(add_bos_token=True), "bos_token_id is missing, but add_bos_token is True",
    ),
    "a template that is not a string": (
        lambda: byte_keys() | {"tokenizer.chat_template": 3}, "must be a string, got 3",
    ),
    "no scores": (lambda: score_keys(scores=None), "scores must have .* one per token"),
    "too many scores": (lambda: score_keys(scores=[0.0] * 9999), "scores must .* one per token"),
    "a score that is not finite": (
        lambda: score_keys(scores=[*score_keys()["tokenizer.ggml.scores"][1:], float("nan")]),
        "scores must have finite numbers",
    ),
    "no unknown token": (lambda: score_keys(unknown_token_id=NO_ID), "not a used token"),
    "an unknown token that is unused": (
        lambda: score_keys(unknown_token_id=len(score_keys()["tokenizer.ggml.tokens"]) - 1),
        "not a used token",
    ),
    "removed spaces": (lambda: score_keys(remove_extra_whitespaces=True), "is True, which is"),
    "a long token": (
        lambda: score_keys(tokens=["<unk>", "a" * 9000], token_type=[2, 1], scores=[0.0, 1.0]),
        "has too long tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), INVALID.values(), ids=INVALID)
def test_invalid_and_unknown_metadata_is_rejected(
    keys: Callable[[], Metadata], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(keys())


def test_a_folder_with_one_gguf_file_is_loaded_without_transformers(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", byte_keys())
    code = (
        "import sys; from nanoengine.text.tokenizer import Tokenizer;"
        f"print(Tokenizer.load({str(tmp_path)!r}).encode('the dog'), 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == f"{byte_level().encode('the dog')} False\n", run.stderr


def test_other_tokenizer_files_of_a_folder_take_precedence_over_its_gguf_file(
    tmp_path: Path,
) -> None:
    byte_fallback().backend.save_pretrained(tmp_path)
    write(tmp_path / "m.gguf", byte_keys())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.encode("the dog") == byte_fallback().encode("the dog")
