"""Unmodified third-party programs, with nanoengine in place of vLLM.

Each runs in a separate process, started as its users start it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.assets import demo_model_path
from tests.support.as_vllm import run_in_process

# Why: a file with a timeout runs first, and the imports of these programs take long.
pytestmark = pytest.mark.timeout(300)

MODEL = str(demo_model_path())


def run_program(folder: Path, source: str, *arguments: str) -> str:
    (folder / "program.py").write_text(source, encoding="utf-8")
    return run_in_process("program.py", MODEL, *arguments, cwd=folder).stdout


OUTLINES = """
import json, sys
from typing import Literal
import outlines
from outlines.types import Regex
from pydantic import BaseModel, ConfigDict
from vllm import LLM, SamplingParams

class Reading(BaseModel):
    model_config = ConfigDict(extra="forbid")
    valid: bool
    count: Literal[1, 2, 3]

model = outlines.from_vllm_offline(LLM(sys.argv[1]))
params = SamplingParams(max_tokens=40, temperature=0)
answers = {
    "text": model("Once upon", sampling_params=params),
    "choice": model("Is it red?", Literal["yes", "no"], sampling_params=params),
    "regex": model("A number:", Regex("[0-9]{3}-[0-9]{4}"), sampling_params=params),
    "json": model("A reading:", Reading, sampling_params=params),
    "batch": model.batch(["Once", "The fox"], Literal["yes", "no"], sampling_params=params),
}
print(json.dumps(answers))
"""


@pytest.mark.extra
def test_outlines_writes_texts_choices_patterns_and_json(tmp_path: Path) -> None:
    pytest.importorskip("outlines")
    answers = json.loads(run_program(tmp_path, OUTLINES))
    assert len(answers["text"].split()) > 4
    assert answers["choice"] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", answers["regex"])
    assert json.loads(answers["json"]).keys() == {"valid", "count"}
    assert all(answer in (["yes"], ["no"]) for answer in answers["batch"])


DISTILABEL = """
import json, sys
from distilabel.models.llms import vLLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration

def model(tokens):  # Without a GPU, distilabel must not search for one.
    options = {"max_new_tokens": tokens, "temperature": 0.7}
    return vLLM(model=sys.argv[1], disable_cuda_device_placement=True, generation_kwargs=options)

if __name__ == "__main__":
    with Pipeline(name="two-steps", cache_dir=sys.argv[2]) as pipeline:
        rows = LoadDataFromDicts(data=[{"instruction": "A story."}, {"instruction": "A fox."}])
        first = TextGeneration(
            name="first", llm=model(12), output_mappings={"generation": "story"}
        )
        second = TextGeneration(
            name="second", llm=model(8), input_mappings={"instruction": "story"},
            output_mappings={"generation": "sequel"},
        )
        rows >> first >> second
    found = pipeline.run(use_cache=False)["default"]["train"]
    print("FOUND", json.dumps([[row["story"], row["sequel"]] for row in found]))
"""


@pytest.mark.extra
def test_distilabel_runs_a_pipeline_of_two_steps(tmp_path: Path) -> None:
    """Each step has an LLM in a separate process."""
    pytest.importorskip("distilabel")
    out = run_program(tmp_path, DISTILABEL, str(tmp_path / "cache"))
    found = json.loads(re.findall("FOUND (.*)", out)[0])
    assert len(found) == 2
    assert all(text.strip() for row in found for text in row)


LANGCHAIN = """
import json, sys
from langchain_community.llms import VLLM
llm = VLLM(model=sys.argv[1], max_new_tokens=12, temperature=0.8, vllm_kwargs={"seed": 3})
found = llm.generate(["Once", "The fox"], stop=["."]).generations
print(json.dumps([one[0].text for one in found]))
"""


@pytest.mark.extra
def test_langchain_generates(tmp_path: Path) -> None:
    pytest.importorskip("langchain_community")
    found = json.loads(run_program(tmp_path, LANGCHAIN).splitlines()[-1])
    assert len(found) == 2
    assert all(text.strip() and "." not in text for text in found)


MTEB = """
import json, sys
import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.vllm_wrapper import VllmEncoderWrapper

FIRST = ["Tom had a dog.", "A red bird sang.", "The cat slept.", "Once upon a time"]
SECOND = ["Tom had a cat.", "The bird was red.", "He ran to the park.", "Long ago"]

class Pairs(AbsTaskSTS):
    min_score, max_score = 0, 5
    metadata = TaskMetadata(
        name="Pairs", dataset={"path": "own/pairs", "revision": "1"}, description="Pairs.",
        type="STS", category="t2t", modalities=["text"], eval_splits=["test"], reference=None,
        eval_langs=["eng-Latn"], main_score="cosine_spearman", date=("2020-01-01", "2020-01-02"),
        domains=["Fiction"], task_subtypes=None, license="mit", annotations_creators="derived",
        dialect=[], sample_creation="created", bibtex_citation="",
    )
    def load_data(self, *args, **options):
        rows = {"sentence1": FIRST, "sentence2": SECOND, "score": json.loads(sys.argv[2])}
        self.dataset = DatasetDict({"test": Dataset.from_dict(rows)})
        self.data_loaded = True

model = VllmEncoderWrapper(sys.argv[1], max_model_len=256)
found = mteb.evaluate(model, [Pairs()], cache=None).task_results[0]
print("FOUND", found.scores["test"][0]["main_score"])
"""


@pytest.mark.extra
def test_mteb_evaluates_vectors(tmp_path: Path) -> None:
    """The reference scores are the cosines of `LLM.score`, so the rank correlation is 1; or -1 when
    they are negated."""
    pytest.importorskip("mteb")
    first = ["Tom had a dog.", "A red bird sang.", "The cat slept.", "Once upon a time"]
    second = ["Tom had a cat.", "The bird was red.", "He ran to the park.", "Long ago"]
    with LLM(MODEL) as llm:
        scores = [one.outputs.score for one in llm.score(first, second, use_tqdm=False)]
    for asked, wanted in ((scores, 1.0), ([-one for one in scores], -1.0)):
        out = run_program(tmp_path, MTEB, json.dumps(asked))
        assert float(re.findall("FOUND (.*)", out)[0]) == pytest.approx(wanted)


WHO = ("The little dog", "A red bird", "Tom", "The old cat")
DID = (" ran to the park.", " was very happy.", " wanted to play.", " saw a big box.")
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"do_sample": False, "until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.eval
def test_the_harness_has_equal_results_for_vllm_and_transformers(tmp_path: Path) -> None:
    """Log-likelihoods agree within 1e-3, and the texts are equal."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    docs = [
        {"question": f"Once upon a time. {who}", "choices": DID, "answer": i % 4}
        for i, who in enumerate(WHO)
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML.
    ours, theirs = vllm_results(tmp_path), transformers_results(tmp_path)
    assert ours["until"] == theirs["until"]
    assert len(ours["choices"]) == len(WHO)
    for row, wanted in zip(ours["choices"], theirs["choices"], strict=True):
        for (score, greedy), (score_wanted, greedy_wanted) in zip(row, wanted, strict=True):
            assert abs(float(score) - float(score_wanted)) < 1e-3
            assert greedy == str(greedy_wanted)


def vllm_results(folder: Path) -> dict[str, list[Any]]:
    """Returns the harness's results of `--model vllm` for each row, by task."""
    run_in_process(
        *("-m", "lm_eval", "--model", "vllm", "--tasks", ",".join(TASKS), "--log_samples"),
        *("--model_args", f"pretrained={MODEL},dtype=float32", "--include_path", str(folder)),
        *("--output_path", str(folder / "vllm")),
        cwd=folder,
        HF_DATASETS_CACHE=str(folder / "datasets"),
    )
    found = {}
    for name in TASKS:
        (samples,) = (folder / "vllm").rglob(f"samples_{name}_*.jsonl")
        found[name] = responses(map(json.loads, samples.read_text().splitlines()))
    return found


def transformers_results(folder: Path) -> dict[str, list[Any]]:
    """Returns the same for the harness's own model in this process; another takes 10 s more."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={MODEL},dtype=float32",
        device="cpu",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {name: responses(results["samples"][name]) for name in TASKS}


def responses(rows: Iterable[Any]) -> list[Any]:
    """Returns the response of each row, in order."""
    ordered = sorted(rows, key=lambda row: row["doc_id"])
    return [[answer[0] for answer in row["resps"]] for row in ordered]
