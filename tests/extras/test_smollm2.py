"""SmolLM2-135M-Instruct, a trained model: tests that random weights and the demo model can't do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.cli.main import main
from tests.support.trained_models import smollm2_gguf

pytestmark = pytest.mark.extra

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(smollm2_gguf(), max_model_len=512, max_num_seqs=4) as llm:
        yield llm


def test_a_chat_answers_and_ends(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    answer = output.outputs[0]
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_eos_and_invisible_stop_strings_end_a_completion(llm: LLM) -> None:
    """With EOS ignored, a stop string can still be the token that ends the message."""
    text = llm.tokenizer.token_text
    assert [text(i) for i in llm.info.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=["<|im_end|>"])
    (output,) = llm.chat(QUESTION, params, use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.stop_reason, text(answer.token_ids[-1])) == ("<|im_end|>", "<|im_end|>")
    assert "Paris" in answer.text and not answer.text.endswith(">")


def test_a_learners_engine_runs_the_converted_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README of `nanoengine learn` says: transformers converts the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for part in model, tokenizer:
        part.save_pretrained(tmp_path / "model")
    assert main(["learn", str(tmp_path / "course")]) == 0
    monkeypatch.syspath_prepend(tmp_path / "course")
    from my_engine.llm import LLM as LearnersLLM

    params, prompts = SamplingParams(temperature=0, max_tokens=12), ["The capital of France is"]
    answers = LearnersLLM(tmp_path / "model").generate(prompts, params)
    with LLM(tmp_path / "model", dtype="float32") as llm:
        [output] = llm.generate(prompts, params, use_tqdm=False)
    assert answers == [output.outputs[0].text]
    assert "Paris" in answers[0]
