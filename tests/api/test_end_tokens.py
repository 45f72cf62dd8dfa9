"""End tokens from files of a checkpoint, templates and stop strings; warnings for two BOS."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams
from nanoengine.checkpoint.config import load_model_config
from nanoengine.text.end_tokens import turn_end_ids
from nanoengine.text.load_tokenizer import with_tokenizer_eos
from nanoengine.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_llm import MakeLLM
from tests.support.text_fixtures import CORPUS, byte_level

TEXT_END, START, TURN_END = 0, 1, 2
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"messages": [{"role": "user", "content": "What is the time?"}]}


@functools.cache
def chatml() -> PreTrainedTokenizerFast:
    """The tokenizer of a base model, fine-tuned with ChatML: `<|im_end|>` closes messages."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 3,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with this tokenizer, which is loaded with transformers only for Qwen2."""
    path = tmp_path_factory.mktemp("base") / request.param
    make_checkpoint(path, request.param, vocab_size=256 + 3, eos_token_id=TEXT_END)
    chatml().save_pretrained(path)
    return path


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
OLD = "special_tokens_map.json"
ABSENT = object()
NAMED_BY_TEMPLATE = {"eos_token": "<|endoftext|>"}
LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[int, list[str]]]]] = {
    "files of the base model": (
        {},
        [(TEXT_END, [GENERATION, CONFIG]), (TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "null": (
        {CONFIG: {"eos_token_id": None}, GENERATION: {"eos_token_id": None}},
        [(TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "missing": (
        {CONFIG: {"eos_token_id": ABSENT}, GENERATION: ABSENT},
        [(TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "outside of the vocabulary": (
        {CONFIG: {"eos_token_id": 300}, GENERATION: {"eos_token_id": [-1, 10**9]}},
        [(TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "a list": (
        {CONFIG: {"eos_token_id": 2}, GENERATION: {"eos_token_id": [2, 0]}},
        [(TURN_END, [GENERATION, CONFIG, "the tokenizer", "the chat template"]),
         (TEXT_END, [GENERATION])],
    ),
    "a token with settings": (
        {TOKENIZER: {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>",
                                   "lstrip": False, "normalized": False, "rstrip": False,
                                   "single_word": False, "special": True}}},
        [(TEXT_END, [GENERATION, CONFIG]), (TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "an older file": (
        {TOKENIZER: {"eos_token": ABSENT}, OLD: {"eos_token": "<|im_end|>"}},
        [(TEXT_END, [GENERATION, CONFIG]), (TURN_END, ["the tokenizer", "the chat template"])],
    ),
    "only the template": (
        {TOKENIZER: NAMED_BY_TEMPLATE},
        [(TEXT_END, [GENERATION, CONFIG, "the tokenizer"]), (TURN_END, ["the chat template"])],
    ),
    "only the template, null elsewhere": (
        {CONFIG: {"eos_token_id": None}, GENERATION: ABSENT, TOKENIZER: {"eos_token": None}},
        [(TURN_END, ["the chat template"])],
    ),
    "a name that is not a token": (
        {TOKENIZER: {"eos_token": "<|never|>"}},
        [(TEXT_END, [GENERATION, CONFIG]), (TURN_END, ["the chat template"])],
    ),
}  # fmt: skip
"""Changes per file; then the ids that end an output, each with its sources."""


def changed(base: Path, path: Path, layout: str) -> Path:
    """Copies a checkpoint, and changes files according to this layout."""
    shutil.copytree(base, path)
    for name, keys in LAYOUTS[layout][0].items():
        file = path / name
        if keys is ABSENT:
            file.unlink()
            continue
        old = json.loads(file.read_text()) if file.exists() else {}
        new = {key: value for key, value in (old | keys).items() if value is not ABSENT}
        file.write_text(json.dumps(new))
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_end_tokens_are_found_in_all_files_of_a_checkpoint(
    base: Path, tmp_path: Path, layout: str
) -> None:
    path = changed(base, tmp_path / "m", layout)
    tokenizer, config = Tokenizer.load(str(path)), load_model_config(path)
    found = with_tokenizer_eos(config, tokenizer, chats=True)
    expected = LAYOUTS[layout][1]
    assert found.eos_token_ids == tuple(token_id for token_id, _ in expected)
    for token_id, sources in expected:
        assert [source for source, named in found.eos_sources if named == token_id] == sources
    plain = with_tokenizer_eos(config, tokenizer)
    is_known = TURN_END in plain.eos_token_ids or not config.eos_token_ids
    assert is_known == (layout not in ("only the template", "a name that is not a token"))


def biased(token_id: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=3, logit_bias={token_id: 100.0}, **options)


def test_the_token_that_closes_a_message_ends_only_chats(base: Path, tmp_path: Path) -> None:
    path = changed(base, tmp_path / "m", "only the template")
    conversation = QUESTION["messages"]
    with LLM(path, device="cpu", attention_backend="naive", kv_cache_gib=0.01) as llm:
        (output,) = llm.chat(conversation, biased(TURN_END), use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.token_ids, answer.text) == ([TURN_END], "")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        options: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_tokens": 2}]
        params = [biased(TURN_END, **each) for each in options]
        plain, ignored, delayed = llm.generate(
            ["What?", QUESTION, QUESTION], params, use_tqdm=False
        )
        assert plain.outputs[0].token_ids == ignored.outputs[0].token_ids == [TURN_END] * 3
        assert TURN_END not in delayed.outputs[0].token_ids[:2]
        assert delayed.outputs[0].token_ids[2:] == [TURN_END]


def test_a_model_without_end_tokens_causes_one_warning(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(base, tmp_path / "m", "only the template, null elsewhere")
    options = {"device": "cpu", "attention_backend": "naive", "kv_cache_gib": 0.01}
    with LLM(path, **options) as llm:
        assert llm.info.eos_token_ids == (TURN_END,)
    assert not caplog.records
    for file in path.glob("chat_template*"):
        file.unlink()
    with LLM(path, **options) as llm:
        llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False)
    (record,) = caplog.records
    assert "defines no EOS token" in record.getMessage()


LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}<|start|>{{ m['role'] }}<|sep|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}"
)
EACH = "{% for m in messages %}"
TEMPLATES: dict[str, tuple[str | None, str | None]] = {
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "Phi 3, which also closes the conversation": (
        EACH + "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}</s>", "<|end|>"),
    "Mistral": (
        EACH + "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}", "</s>"),
    "Llama 2, with a space before": (
        EACH + "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}", "</s>"),
    "Gemma, with another name of the assistant": (
        EACH + "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
        "{{ m['content'] }}<end_of_turn>\n{% endfor %}", "<end_of_turn>"),
    "GLM 4, where the start of the next message closes one": (
        EACH + "<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}", "<|user|>"),
    "gpt-oss, with another token for the last message": (
        EACH + "<|start|>{{ m['role'] }}<|sep|>{{ m['content'] }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}", "<|return|>"),
    "a token that is not special": (
        EACH + "{{ m['role'] }}: {{ m['content'] }}<msg>{% endfor %}", "<msg>"),
    "a token that begins with another token": (
        EACH + "{{ m['role'] }}: {{ m['content'] }}<msg>/>{% endfor %}", "<msg>/>"),
    "text that is not a token": (
        EACH + "{{ m['role'] }}: {{ m['content'] }}\n###\n{% endfor %}", None),
    "a template that rejects the assistant": (
        EACH + "{% if m['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        None),
    "no template": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_token_that_closes_a_message_is_found(case: str) -> None:
    template, expected = TEMPLATES[case]
    names = ["<|eot_id|>", "<|end|>", "<|return|>", "<end_of_turn>", "<start_of_turn>", "<|sep|>"]
    backend = copy.deepcopy(byte_level().backend)
    backend.add_special_tokens({"additional_special_tokens": [*names, "<|start|>"]})
    backend.add_tokens([AddedToken(name, special=False) for name in ("<msg>", "<msg>/>")])
    backend.chat_template = template
    found = turn_end_ids(Tokenizer(backend), None)
    assert found == (() if expected is None else (backend.convert_tokens_to_ids(expected),))
    if template is not None:
        assert turn_end_ids(Tokenizer(copy.deepcopy(byte_level().backend)), "{{ messages }}") == ()


# --- stop strings ---------------------------------------------------------------------------------


def test_a_stop_string_that_is_a_special_token_ends_the_output_by_its_id(make_llm: MakeLLM) -> None:
    answers = {"one": " two<|user|> three", "two": " four, five<tool> six", "dog": " a<|user|>"}
    end = byte_level().token_id("<|user|>")
    with make_llm(answers) as llm:

        def answer(prompt: str = "one", **options: Any) -> Any:
            options = {"stop": ["no", "<|user|>"], "temperature": 0, "max_tokens": 64} | options
            params = SamplingParams(**options)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            pieces = [each.outputs[0].text for each in llm.stream(prompt, params, kind="delta")]
            assert "".join(pieces) == output.outputs[0].text
            return output.outputs[0]

        found = answer()
        assert (found.text, found.finish_reason) == (" two", "stop")
        assert (found.stop_reason, found.token_ids[-1]) == ("<|user|>", end)
        assert answer(include_stop_str_in_output=True).text == " two<|user|>"
        shown = answer(skip_special_tokens=False, include_stop_str_in_output=True)
        assert (shown.text, shown.stop_reason) == (" two<|user|>", "<|user|>")
        assert answer(skip_special_tokens=False).text == " two"
        assert answer(ignore_eos=True).stop_reason == "<|user|>"
        assert answer(stop=["</s>"]).stop_reason == "</s>"  # It is found before the EOS.
        assert answer(stop=["<|user|> th"]).text == " two three"  # This string is not a token.
        # A token that is visible in the text is matched as text.
        assert (answer("two", stop=["<tool>"]).text) == " four, five"
        first, second = answer("dog", min_tokens=2), answer("dog", min_tokens=9)
        assert (first.text, first.stop_reason) == (" a", "<|user|>")
        assert second.finish_reason == "stop" and second.stop_reason is None


# --- BOS ------------------------------------------------------------------------------------------


@pytest.fixture
def with_bos() -> Tokenizer:
    """A tokenizer that prepends `<s>` to each text; its chat template has `<s>` as well."""
    backend = copy.deepcopy(byte_level().backend)
    raw = backend.backend_tokenizer
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.chat_template = "{{ bos_token }}" + EACH + "{{ m['content'] }}</s>{% endfor %}"
    return Tokenizer(backend)


CALLS: dict[str, Callable[[LLM, str], list[int]]] = {
    "generate": lambda llm, text: llm.generate(text, use_tqdm=False)[0].prompt_token_ids,
    "a dict": lambda llm, text: llm.generate({"prompt": text}, use_tqdm=False)[0].prompt_token_ids,
    "stream": lambda llm, text: next(iter(llm.stream([text]))).prompt_token_ids,
    "encode": lambda llm, text: llm.tokenizer.encode(text),
}


@pytest.mark.parametrize("call", CALLS)
def test_prompts_that_begin_with_bos_cause_one_warning(
    call: str, make_llm: MakeLLM, with_bos: Tokenizer
) -> None:
    with make_llm(tokenizer=with_bos) as llm:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert CALLS[call](llm, "The dog")[:2] != [0, 0]
            assert CALLS[call](llm, "aa bb")[0] == 0
        with pytest.warns(UserWarning, match="begins with the text '<s>'") as warned:
            found = [CALLS[call](llm, text) for text in ("<s>The dog", "<s>The cat")]
        assert len(warned) == 1 and [ids[:2] for ids in found] == [[0, 0], [0, 0]]


def test_a_chat_has_bos_only_once(make_llm: MakeLLM, with_bos: Tokenizer) -> None:
    with make_llm(tokenizer=with_bos) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        (by_chat,) = llm.chat(QUESTION["messages"], use_tqdm=False)
        (by_dict,) = llm.generate([QUESTION], use_tqdm=False)
    assert by_chat.prompt_token_ids == by_dict.prompt_token_ids
    assert by_chat.prompt_token_ids.count(0) == 1


def test_a_tokenizer_that_adds_no_bos_causes_no_warning(make_llm: MakeLLM) -> None:
    with make_llm() as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        begun, plain = llm.generate(["<s><s>a", "aa"], use_tqdm=False)
    assert begun.prompt_token_ids[:2] == [0, 0] and plain.prompt_token_ids[0] != 0
