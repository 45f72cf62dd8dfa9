"""lm-evaluation-harness gets the same scores from the engine as from its own `hf` model."""

from __future__ import annotations

import functools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from nanoengine.assets import demo_model_path
from nanoengine.cli.main import main
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings.config import EngineConfig

pytestmark = pytest.mark.eval
lm_eval = pytest.importorskip("lm_eval", reason="needs pip install 'nanoengine[eval]'")
pytest.importorskip("accelerate", reason="the harness's hf model, our oracle, needs accelerate")

SUBJECTS = ["The little dog", "A red bird", "Tom", "The old cat", "Lily and her mom"]
PREDICATES = [" ran to the park.", " was very happy.", " wanted to play.", " saw a big box."]
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "target_delimiter": "",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "until": {
        "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": [".", "dog"], "max_gen_toks": 24},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder of tasks on a few documents of its own."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    docs = []
    for _ in range(12):
        subject = rng.choice(SUBJECTS)
        docs.append(
            {
                "question": "Once upon a time there was a story. " * 3 + subject,
                "choices": rng.sample(PREDICATES, 4),
                "answer": rng.randrange(4),
                "text": f"{subject}{rng.choice(PREDICATES)} " * rng.choice([2, 40]),
            }
        )
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for name, task in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
            "test_split": "test",
        } | task
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML.
    return folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Returns the harness's results of each request, per model and task."""
    from lm_eval.tasks import TaskManager

    from nanoengine.bench.evaluation import NanoEngineLM

    found = {}
    options = {"pretrained": str(demo_model_path()), "dtype": "float32", "max_length": 200}
    ours = NanoEngineLM(**options, device="cpu")
    hf = lm_eval.api.registry.get_model("hf")(**options, device="cpu")
    for name, model in (("ours", ours), ("hf", hf)):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
        found[name] = {
            task: [sample["resps"] for sample in results["samples"][task]] for task in TASKS
        }
    ours.llm.close()
    return found


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why not the harness's own tasks: listing thousands of files takes 5 s per command."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)


def test_choices_have_the_log_likelihoods_of_transformers(samples):
    ours, theirs = samples["ours"]["choices"], samples["hf"]["choices"]
    assert len(ours) == 12 and all(len(choices) == 4 for choices in ours)
    for scores, reference in zip(ours, theirs, strict=True):
        for ((score, greedy),), ((score_hf, greedy_hf),) in zip(scores, reference, strict=True):
            assert score == pytest.approx(score_hf, abs=1e-3)
            assert greedy == greedy_hf


def test_rolling_windows_have_the_log_likelihoods_of_transformers(samples):
    ours, theirs = samples["ours"]["rolling"], samples["hf"]["rolling"]
    scores = [score for windows in ours for (score,) in windows]
    assert min(scores) < -300, "some texts take several windows"
    assert scores == pytest.approx([score for windows in theirs for (score,) in windows], abs=1e-3)


def test_greedy_texts_equal_those_of_transformers(samples):
    assert samples["ours"]["until"] == samples["hf"]["until"]
    assert len({responses[0][0] for responses in samples["ours"]["until"]}) > 2


@pytest.fixture(scope="module")
def model():
    from nanoengine.bench.evaluation import NanoEngineLM

    model = NanoEngineLM(str(demo_model_path()), device="cpu", num_kv_blocks=256)
    yield model
    model.llm.close()


def test_options_of_a_task_are_supported_or_refused(model):
    params = model._sampling_params({"until": ["\n", ""], "max_gen_toks": 7, "top_k": 3})
    assert (params.max_tokens, params.stop, params.temperature, params.top_k) == (7, ("\n",), 0, 3)
    with pytest.raises(RequestError, match="num_beams"):
        model._sampling_params({"num_beams": 4})
    with pytest.raises(RequestError, match="max_gen_toks=5000"):
        model._sampling_params({"max_gen_toks": 5000})


def test_chat_templates_and_special_tokens_are_applied_once(model):
    text = model.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert "Hello" in text
    assert model.tok_encode(text)[:3] == model.llm.tokenizer.encode(text)[:3]
    begin = model.tokenizer.bos_token
    if begin:
        assert model.tok_encode(f"{begin}Hello").count(model.tokenizer.bos_token_id) == 1


def test_the_harness_keeps_its_own_models(model):
    assert {"hf", "vllm", "nanoengine"} <= set(lm_eval.api.registry.MODEL_REGISTRY)


def test_a_batch_size_causes_a_warning_that_it_has_no_effect():
    from nanoengine.bench.evaluation import NanoEngineLM

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NanoEngineLM(str(demo_model_path()), batch_size=64, device="cpu").llm.close()
    assert any("max_num_seqs" in str(warning.message) for warning in caught)


def test_the_eval_command_runs_tasks(folder, monkeypatch, capsys):
    from nanoengine.cli import eval as command

    options = ["--tasks", "choices", "--include_path", str(folder), "--limit", "3"]
    assert main(["eval", "demo", *options, "--model_args", "dtype=float32"]) in (0, None)
    assert "|choices|" in capsys.readouterr().out.replace(" ", "")
    assert main(["eval"]) == 0 and "--tasks" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="must be the first argument"):
        command.main(["--tasks", "x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "nosuch"], "lm-eval: Tasks not found: nosuch"),
        ([], "lm-eval: No tasks specified"),
        (["--tasks", "choices", "--limit", "0"], "--limit must be a number of questions"),
        (["--tasks", "choices", "--limit=-2"], "greater than 0, got -2"),
        (["--tasks", "choices", "--output_path", "/proc/none/x"], "can't be written"),
        (["--tasks", "choices", "--output_path=/proc/none.json"], "can't be written"),
        (["--tasks", "choices", "--model_args", "max_length=abc"], "max_length must be an integer"),
        (["--tasks", "choices", "--model_args", "max_gen_toks=0"], "max_gen_toks must be an int"),
        (["--tasks", "choices", "--model_args", "bogus=1"], "unknown option 'bogus'"),
    ],
)
def test_invalid_options_are_one_line_errors(folder, capsys, monkeypatch, options, message):
    """Regression: it printed a traceback; unwritable results were lost with exit code 0."""
    monkeypatch.setattr(
        "nanoengine.bench.evaluation.LLM", lambda model, **o: EngineConfig(model=model, **o)
    )
    assert main(["eval", "demo", "--include_path", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_choices_share_all_full_blocks_of_their_context(model):
    """Prefill tokens are 3.79 times fewer; with blocks of 64 they were only 2.99 times fewer."""
    draw = random.Random(0)
    requests = []
    for _ in range(3):
        context = draw.choices(range(300, 400), k=500)
        requests += [(None, context, draw.choices(range(300, 400), k=5)) for _ in range(4)]
    draw.shuffle(requests)
    before = model.llm.stats().prefill_tokens
    model._loglikelihood_tokens(requests, disable_tqdm=True)
    computed = model.llm.stats().prefill_tokens - before
    assert computed == 3 * (505 + 3 * (505 - 496)), "31 blocks of 16 are context alone"
    assert 12 * 505 / computed > 3.79
