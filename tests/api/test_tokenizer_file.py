"""A tokenizer.json is loaded without transformers with equal results, or with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from nanoengine import SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.errors import ConfigError, RequestError
from nanoengine.text.end_tokens import bad_word_ids
from nanoengine.text.load_tokenizer import MODEL_TYPES, find_file
from nanoengine.text.tokenizer import Tokenizer
from tests.support.text_fixtures import CHAT_TEMPLATE, KINDS, byte_level

TALK = [{"role": "user", "content": "go home"}, {"role": "assistant", "content": "it is late"}]


def save(directory: Path, kind: str = "byte_level", model_type: str = "llama") -> Path:
    """Saves a tokenizer with transformers, and a config.json with this model type."""
    KINDS[kind]().backend.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def change(directory: Path, name: str, **values: Any) -> None:
    """Sets keys in a JSON file of the directory; None removes a key."""
    found = json.loads((directory / name).read_text(encoding="utf-8")) | values
    remaining = {key: value for key, value in found.items() if value is not None}
    (directory / name).write_text(json.dumps(remaining), encoding="utf-8")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Per kind the tokenizer loaded without transformers, and with it."""
    folders = {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    folders["demo"] = demo_model_path()
    found = {}
    for kind, folder in folders.items():
        file = find_file(folder)
        assert file is not None, kind
        found[kind] = Tokenizer(file), Tokenizer(AutoTokenizer.from_pretrained(folder))
    return found


TEXTS = st.text(max_size=30) | st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<|user|>", "<tool>", "<unk>", "<|im_end|>", " ", "the dog", "\n", "€🙂"]
    )
).map("".join)

kinds = pytest.mark.parametrize("kind", [*KINDS, "demo"])


@kinds
@given(text=TEXTS, special=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_ids_and_texts_equal_transformers(pairs, kind, text, special, data) -> None:  # type: ignore[no-untyped-def]
    plain, full = pairs[kind]
    ids = plain.encode(text, add_special_tokens=special)
    assert ids == full.encode(text, add_special_tokens=special)
    ids += data.draw(st.lists(st.integers(0, len(full.backend) - 1), max_size=8))
    for skip in (True, False):
        for anchored in (True, False):
            options = {"skip_special_tokens": skip, "anchored": anchored}
            assert plain.decode(ids, **options) == full.decode(ids, **options)
    assert plain.output_text(ids, SamplingParams()) == full.output_text(ids, SamplingParams())


@kinds
def test_properties_of_tokens_equal_transformers(pairs, kind) -> None:  # type: ignore[no-untyped-def]
    plain, full = pairs[kind]
    for name in ("special_ids", "byte_ids", "anchor", "eos_token"):
        assert getattr(plain, name) == getattr(full, name), name
    assert plain.special_ids
    words = ["dog", "naïve €"]
    assert bad_word_ids(plain, words) == bad_word_ids(full, words)
    with pytest.raises(RequestError, match="UTF-8"):
        plain.encode("a\ud800b")


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_transformers_uses_the_class_that_the_checkpoint_names(
    tmp_path: Path, model_type: str
) -> None:
    found = AutoTokenizer.from_pretrained(save(tmp_path, model_type=model_type))
    assert type(found).__name__ == "TokenizersBackend"
    assert found.backend_tokenizer.to_str() == byte_level().backend.backend_tokenizer.to_str()
    assert find_file(tmp_path) is not None


def test_chats_are_rendered_by_transformers(tmp_path: Path) -> None:
    (save(tmp_path) / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer.load(str(tmp_path))
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK, tokenize=False)
    assert tokenizer.render_chat(TALK, add_generation_prompt=False) == expected
    assert tokenizer.backend is tokenizer.backend


CONFIG, SAVED = "tokenizer_config.json", "tokenizer.json"
INCOMPLETE: dict[str, Callable[[Path], object]] = {
    "another class": lambda path: change(path, CONFIG, tokenizer_class="LlamaTokenizer"),
    "an unknown setting": lambda path: change(path, CONFIG, split_special_tokens=True),
    "a token that is not in the vocabulary": lambda path: change(path, CONFIG, pad_token="<pad>"),
    "a token that is not special": lambda path: change(path, CONFIG, pad_token="<tool>"),
    "a token with properties": lambda path: change(path, CONFIG, eos_token={"content": "</s>"}),
    "named extra tokens": lambda path: change(path, CONFIG, extra_special_tokens={"tool": "<s>"}),
    "custom code": lambda path: change(path, CONFIG, auto_map={"AutoTokenizer": "x.Y"}),
    "another model": lambda path: change(path, "config.json", model_type="qwen2"),
    "no model": lambda path: (path / "config.json").unlink(),
    "no settings": lambda path: (path / CONFIG).unlink(),
    "settings that are a list": lambda path: (path / CONFIG).write_text("[]"),
    "no vocabulary": lambda path: (path / SAVED).unlink(),
    "a broken vocabulary": lambda path: (path / SAVED).write_text("{"),
    "tokens in an older file": lambda path: (path / "added_tokens.json").write_text("{}"),
    "no post-processor": lambda path: change(path, SAVED, post_processor=None),
    "truncation": lambda path: change(
        path,
        SAVED,
        truncation={
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("change_it", INCOMPLETE.values(), ids=INCOMPLETE)
def test_other_checkpoints_are_left_to_transformers(
    tmp_path: Path, change_it: Callable[[Path], object]
) -> None:
    assert find_file(save(tmp_path)) is not None
    change_it(tmp_path)
    assert find_file(tmp_path) is None


def test_an_error_names_a_damaged_tokenizer_file(tmp_path: Path) -> None:
    (save(tmp_path) / SAVED).write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not valid JSON"):
        Tokenizer.load(str(tmp_path))


def test_an_extra_special_token_must_be_special_in_the_vocabulary(tmp_path: Path) -> None:
    backend = AutoTokenizer.from_pretrained(save(tmp_path))
    backend.add_tokens([AddedToken("<new>", special=False)])
    backend.save_pretrained(tmp_path)
    change(tmp_path, CONFIG, extra_special_tokens=["<new>"])
    assert find_file(tmp_path) is None


def test_generating_does_not_import_transformers() -> None:
    code = (
        "import sys; from nanoengine import LLM, SamplingParams;"
        "from nanoengine.assets import demo_model_path as model;"
        "llm = LLM(model(), device='cpu', attention_backend='naive', num_kv_blocks=64);"
        "llm.generate('Once', SamplingParams(max_tokens=1), use_tqdm=False);"
        "print(sorted({'transformers', 'triton', 'scipy', 'sympy', 'pandas', 'torch._dynamo'}"
        " & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr
