"""The bundled demo model in a whole engine. Its answers are correct only if the engine is."""

import json
import re
from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path

RECALL = Path(__file__).parents[1] / "data" / "recall.jsonl"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm():
    with LLM(demo_model_path(), kv_cache_gib=0.5) as llm:
        yield llm


@pytest.mark.guards("nanoengine/assets/**/*", "nanoengine/models/*.py", "nanoengine/layers/*.py")
def test_held_out_facts_are_recalled(llm):
    """200 questions on passages of 100 to 800 tokens; at least 95 % must be answered exactly."""
    cases = [json.loads(line) for line in RECALL.read_text().splitlines()]
    outputs = llm.generate([case["prompt"] for case in cases], GREEDY, use_tqdm=False)
    found = [(o.outputs[0].text.strip(), o.outputs[0].finish_reason) for o in outputs]
    exact = [pair == (case["answer"], "stop") for case, pair in zip(cases, found, strict=True)]
    assert len(exact) == 200
    lengths = {round(case["passage_tokens"], -2) for case in cases}
    assert lengths == {100, 200, 400, 600, 800}
    assert sum(exact) >= 190, f"{sum(exact)} of 200 exact"


def test_questions_on_one_passage_share_its_blocks(llm):
    passage = json.loads(RECALL.read_text().splitlines()[-1])["prompt"].split("\n\nQuestion:")[0]
    facts = re.findall(r"The ([\w ]+) of (?:the )?(\w+): ", passage)[:4]
    questions = [f"What is the {what} of {subject}?" for what, subject in facts]
    prompts = [f"{passage}\n\nQuestion: {question}\nAnswer:" for question in questions]
    llm.engine.reset_prefix_cache()
    first, *others = llm.generate(prompts, GREEDY, use_tqdm=False)
    block_size = llm.info.block_size
    shared = len(llm.tokenizer.encode(passage)) // block_size * block_size
    assert first.num_cached_tokens == 0
    assert [output.num_cached_tokens for output in others] == [shared] * len(others)


def test_stories_end_by_themselves_in_whole_sentences(llm):
    prompts = [f"Tell a story about {thing}." for thing in ("a fox", "a brave rabbit", "Mia")]
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    long = SamplingParams(temperature=0, max_tokens=300)
    for output in llm.chat(talks, long, use_tqdm=False):
        (story,) = output.outputs
        assert story.finish_reason == "stop"
        sentences = re.split(r"(?<=\.)\"? ", story.text.strip())
        assert len(sentences) >= 5
        assert all(re.match(r"[\"']?[A-Z]", sentence) for sentence in sentences)
