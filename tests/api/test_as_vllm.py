"""Unmodified vLLM programs run; names that are not supported raise where they are used."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from nanoengine import LLM, BeamSearchParams, SamplingParams, as_vllm
from nanoengine.as_vllm import TABLES
from nanoengine.as_vllm.engine_args import (
    DEFAULTS,
    EngineArgs,
    FlexibleArgumentParser,
    non_default_options,
)
from nanoengine.as_vllm.llm import VLLM, VLLMEngine
from nanoengine.as_vllm.nano import NanoLLM, NanoParams
from nanoengine.as_vllm.params import RequestOutputKind, VLLMParams, VLLMStructuredOutputs
from nanoengine.assets import demo_model_path
from nanoengine.errors import ConfigError, NanoEngineError, RequestError
from nanoengine.settings.vllm_names import LLM_OPTIONS, SAMPLING_PARAMS
from tests.support.as_vllm import run_here, run_in_process
from tests.support.as_vllm import vllm_modules as vllm_modules

MODEL = str(demo_model_path())
CLIENTS = Path(__file__).parents[1] / "clients"
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[VLLM]:
    with VLLM(MODEL, num_gpu_blocks_override=128) as llm:
        yield llm


@pytest.mark.usefixtures("vllm_modules")
def test_vectors_and_scores_equal_those_of_llm(llm: VLLM) -> None:
    vllm = importlib.import_module("vllm")
    params = vllm.PoolingParams(dimensions=8)
    found = llm.embed(["Once", "upon"], pooling_params=params, use_tqdm=False)
    assert {type(one) for one in found} == {vllm.EmbeddingRequestOutput}
    assert [len(one.outputs.embedding) for one in found] == [8, 8]
    same, other = llm.score("a dog", ["a dog", "Once upon"], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1) and other.outputs.score < 0.999


# --- modules --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_modules")
def test_every_listed_name_is_in_every_module() -> None:
    for module in TABLES["modules"]:
        names = TABLES["nano_names" if module.startswith("nano") else "names"]
        for name, home in names.items():
            found = getattr(importlib.import_module(module), name)
            assert found is getattr(importlib.import_module(home.split(":")[0]), home.split(":")[1])


@pytest.mark.usefixtures("vllm_modules")
def test_an_unsupported_name_raises_when_it_is_used() -> None:
    lora, media = LLM_OPTIONS["enable_lora"], LLM_OPTIONS["limit_mm_per_prompt"]
    assert {lora["refused"], media["no effect"]} < TABLES["absent"].keys()
    for why, names in TABLES["absent"].items():
        for name in names:
            found = getattr(importlib.import_module("vllm"), name)
            assert found is getattr(importlib.import_module("vllm"), name)
            assert not isinstance(3, found)
            assert found | None
            for use in (lambda f=found: f(1), lambda f=found: type("Own", (f,), {})):
                with pytest.raises(ConfigError, match=f"{name} is not supported: {why[:20]}"):
                    use()
            with pytest.raises(
                AttributeError, match=f"{name}.is_cuda is not supported: {why[:20]}"
            ):
                found.is_cuda  # noqa: B018


@pytest.mark.usefixtures("vllm_modules")
def test_an_unknown_module_or_name_raises_import_error() -> None:
    for line, message in (
        ("import vllm.something.unknown", "has no 'vllm.something'"),
        ("from vllm.outputs import Unknown", "has no 'vllm.outputs.Unknown'"),
        ("from vllm import SamplingParam", "did you mean 'SamplingParams'"),
        ("from nanovllm import LoRARequest", "has no 'nanovllm.LoRARequest'"),
    ):
        with pytest.raises(ImportError, match=message):
            exec(line)
    assert not hasattr(importlib.import_module("vllm"), "Unknown")


@pytest.mark.usefixtures("vllm_modules")
def test_the_package_version_is_vllms() -> None:
    vllm = importlib.import_module("vllm")
    assert vllm.__version__ == version("vllm") == TABLES["version"]
    assert importlib.util.find_spec("vllm") is not None


def test_install_prints_once_and_raises_after_an_import_of_vllm(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(ConfigError, match="vllm is imported already"):
        as_vllm.install()
    monkeypatch.delitem(sys.modules, "vllm")
    request.getfixturevalue("vllm_modules")
    as_vllm.install()
    assert capsys.readouterr().err.count("provides the API of vllm") == 1


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize("name", ["chat", "constructor", "nano_bench"])
def test_a_program_runs_unmodified(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no effect in nanoengine")
        run_here(CLIENTS / f"{name}.py", MODEL, monkeypatch=monkeypatch)
    assert len(capsys.readouterr().out.split()) >= 4


def test_a_program_and_its_child_processes(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'helper'")
    (tmp_path / "program.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "import helper\n"
        "from vllm import SamplingParams\n"
        "def child(n): return SamplingParams(max_tokens=n).max_tokens\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(helper.WORD, sys.argv[1:], pool.map(child, [3]), flush=True)\n"
        "    subprocess.run([sys.executable, '-c', 'import vllm; print(vllm.__version__)'])\n"
        "    sys.exit(7)\n"
    )
    done = run_in_process("program.py", "-m", "3", cwd=tmp_path, code=7)
    assert done.stdout == f"helper ['-m', '3'] [3]\n{TABLES['version']}\n"
    done = run_in_process("-m", "program", "x", cwd=tmp_path, code=7)
    assert done.stdout == f"helper ['x'] [3]\n{TABLES['version']}\n"


@pytest.mark.parametrize("arguments", [[], ["-h"], ["-m"], ["missing.py"]])
def test_a_missing_program_is_reported(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m|there is no file 'missing.py'"):
        as_vllm.run(arguments)
    assert not any(isinstance(one, as_vllm.Finder) for one in sys.meta_path)


# --- parameters -----------------------------------------------------------------------------------


def test_changed_parameters_have_an_effect() -> None:
    params = VLLMParams(1, temperature=0.5, stop="x")
    params.max_tokens = 7
    params.stop.append("y")
    assert params.to_native() == SamplingParams(temperature=0.5, stop=["x", "y"], max_tokens=7)
    copied = params.clone()
    copied.stop.append("z")
    assert params.stop == ["x", "y"]
    assert (
        pickle.loads(pickle.dumps(copied)).to_native()
        == copy.copy(copied).to_native()
        == copied.to_native()
    )
    assert "max_tokens=7" in repr(params)
    params.top_p = 3.0
    with pytest.raises(RequestError, match="top_p must be in"):
        params.to_native()


def test_parameters_can_be_rebuilt_from_their_fields() -> None:
    params = VLLMParams(n=2, seed=3, stop_token_ids=[5], logprobs=1)
    fields = VLLMParams.__struct_fields__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = VLLMParams(**{name: getattr(params, name) for name in fields})
    assert again.to_native() == params.to_native()
    known = inspect.signature(VLLMParams).parameters.keys()
    assert set(fields) == set(known) == VLLMParams.__annotations__.keys()
    assert set(SAMPLING_PARAMS) <= set(fields)


def test_unsupported_parameters_raise() -> None:
    form = VLLMStructuredOutputs(regex="a")
    for options, message in (
        ({"max_token": 3}, "max_token"),
        ({"best_of": 3}, "best_of=3 is not supported"),
        ({"watermarking": True}, "unknown option 'watermarking'"),
        ({"guided_decoding": form, "structured_outputs": form}, "set one"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            VLLMParams(**options)
    params = VLLMParams()
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        params.max_token = 3
    with pytest.raises(AttributeError, match="sampling_type"):
        params.sampling_type  # noqa: B018


def test_from_optional_replaces_none_by_defaults() -> None:
    params = VLLMParams.from_optional(temperature=None, top_p=None, stop=None, max_tokens=None)
    assert params.to_native() == SamplingParams(max_tokens=None)
    assert VLLMStructuredOutputs.from_optional(json=None, backend="xgrammar") is None


class Person:
    """A class with the schema method of a Pydantic model."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize(
    "params",
    [
        VLLMParams(guided_decoding=VLLMStructuredOutputs(json=Person, backend="outlines")),
        VLLMParams(structured_outputs=VLLMStructuredOutputs({"type": "object"})),
        VLLMParams(structured_outputs={"json": {"type": "object"}}),
        VLLMParams(guided_decoding=VLLMStructuredOutputs.from_optional(json='{"type": "object"}')),
    ],
)
def test_structured_outputs_work_under_all_of_their_names(params: VLLMParams) -> None:
    expected = SamplingParams(structured_outputs={"json": {"type": "object"}})
    assert params.to_native() == expected


def test_unsupported_structured_outputs_raise() -> None:
    for options, message in (
        ({"regex": "a", "backend": "none"}, "backend must be one of auto"),
        ({"json": {}, "whitespace_pattern": " ?"}, "whitespace_pattern"),
        ({}, "exactly one of"),
    ):
        with pytest.raises(RequestError, match=message):
            VLLMStructuredOutputs(**options)


# --- calls ----------------------------------------------------------------------------------------


def test_outputs_equal_those_of_llm_with_vllms_fields(llm: VLLM) -> None:
    params = VLLMParams(**GREEDY, logprobs=1, prompt_logprobs=1)
    (ours,) = LLM.generate(llm, "Once upon", params.to_native(), use_tqdm=False)
    outputs = llm.generate("Once upon", params, use_tqdm=False)
    outputs += llm.generate(prompt_token_ids=[ours.prompt_token_ids], sampling_params=[params])
    for output in outputs:
        (found,) = output.outputs
        assert found.finished() and found.error is None
        assert found.logprobs == ours.outputs[0].logprobs
        assert output.prompt_logprobs == ours.prompt_logprobs
        assert (found.text, found.token_ids) == (ours.outputs[0].text, ours.outputs[0].token_ids)
        assert found.lora_request is output.encoder_prompt is output.kv_transfer_params is None
        found.text = "changed"
        assert "changed" in repr(output)


def test_enqueued_requests_give_the_outputs_of_a_call(llm: VLLM) -> None:
    """The requests survive another call in between, and keep their ids and their order;
    an interrupted wait drops none."""
    params, talk = VLLMParams(**GREEDY), [{"role": "user", "content": "Hello"}]
    ids = llm.enqueue(["Once upon", "Tom"], [params, VLLMParams(temperature=0, max_tokens=1)])
    with pytest.raises(RequestError, match="prompt 1: "):
        llm.enqueue(["Once", [-1]], params)
    expected = llm.generate(["Once upon", "Tom"], params, use_tqdm=False)
    expected += llm.chat(talk, params, use_tqdm=False)
    ids += llm.enqueue_chat(talk, params, priority=[-1], add_generation_prompt=True)
    interrupted = patch.object(LLM, "_complete", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == ids and len({*ids}) == 3
    tokens = [output.outputs[0].token_ids for output in expected]
    assert [output.outputs[0].token_ids for output in found] == [
        tokens[0],
        tokens[1][:1],
        tokens[2],
    ]
    assert found[2].prompt == expected[2].prompt and found[0].outputs[0].finished()
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_a_failed_request_causes_a_warning(llm: VLLM) -> None:
    long = VLLMParams(max_tokens=1)
    with pytest.warns(UserWarning, match=r"1 of 2 requests failed: .*max_model_len"):
        _, output = llm.generate(["Once", [5] * 4000], long, False, on_error="record")
    assert output.outputs[0].finish_reason == "error"


def test_calls_reject_unsupported_options(llm: VLLM) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    params = llm.get_default_sampling_params()
    params.max_tokens = 2
    assert llm.chat(talk, params, chat_template_content_format="auto", mm_processor_kwargs=None)
    for call in (
        lambda: llm.chat(talk, chat_template_content_format="openai"),
        lambda: llm.generate("Once", tokenization_kwargs={"truncation": True}),
        lambda: llm.enqueue("Once", tokenization_kwargs={"truncation": True}),
        lambda: llm.enqueue_chat(talk, mm_processor_kwargs={"a": 1}),
        lambda: llm.reset_prefix_cache(reset_running_requests=True),
        lambda: llm.llm_engine.add_request("a", "Once", params, trace_headers={"a": "b"}),
        lambda: llm.llm_engine.add_request("a", "Once", params, unknown=None),
        lambda: VLLMEngine.from_engine_args(EngineArgs(MODEL), unknown=None),
        lambda: llm.generate(),
        lambda: llm.generate("Once", prompt_token_ids=[[5]]),
    ):
        with pytest.raises(
            RequestError, match=r"is not supported|either prompts or|unknown option"
        ):
            call()


def test_beams_begin_with_the_prompt(llm: VLLM) -> None:
    (found,) = llm.beam_search(["Once upon"], BeamSearchParams(2, 3), use_tqdm=False)
    best = found.sequences[0]
    assert best.text == "Once upon a time,"
    assert best.tokens[:2] == llm.get_tokenizer().encode("Once upon")
    assert best.cum_logprob < 0


def test_attributes_that_programs_read_exist(llm: VLLM) -> None:
    config = llm.llm_engine.model_config
    assert config is llm.model_config
    assert config.max_model_len == llm.info.max_model_len
    assert config.get_vocab_size() == config.hf_config.vocab_size
    assert (str(config.dtype), llm.get_world_size()) == (f"torch.{llm.info.dtype}", 1)
    for name, read in {
        "llm_engine.cache_config": lambda: llm.llm_engine.cache_config,
        "model_config.uses_mrope": lambda: config.uses_mrope,
        "model_executor.scheduler": lambda: llm.llm_engine.model_executor.scheduler,
    }.items():
        with pytest.raises(AttributeError, match=name):
            read()


def test_a_training_loop_loads_its_weights(llm: VLLM) -> None:
    """Tensors are passed one at a time, as TRL does."""
    params = VLLMParams(**GREEDY)

    def answer() -> str:
        return llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].text

    before, name = answer(), "model.norm.weight"
    old = llm.engine.executor.model.model.norm.weight.clone()
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for weight, is_same in ((-old, False), (old, True)):
        assert model.load_weights([(name, weight)]) == {name}
        assert (answer() == before) is is_same
    with pytest.raises(AttributeError, match=r"vLLM's model\.named"):
        model.named_parameters()


def test_vllm_environment_variables_cause_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "0")
    with pytest.warns(UserWarning, match="VLLM_USE_V1"):
        llm = VLLM(MODEL, num_kv_blocks=64)
    engine = llm.llm_engine
    del engine.model_executor
    with pytest.raises(NanoEngineError, match="closed"):
        llm.generate("Once")


# --- the engine -----------------------------------------------------------------------------------


def test_an_engine_is_stepped(llm: VLLM) -> None:
    (whole,) = llm.generate("Once upon", VLLMParams(**GREEDY), use_tqdm=False)
    engine = llm.llm_engine
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "Once upon", VLLMParams(**GREEDY, output_kind=kind))
    engine.add_request("gone", {"prompt": "Long"}, VLLMParams(max_tokens=9))
    with pytest.raises(RequestError, match="'gone' is in use"):
        engine.add_request("gone", "Long", VLLMParams())
    engine.abort_request(["gone", "unknown"])
    assert engine.get_num_unfinished_requests() == 3
    seen: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    text = whole.outputs[0].text
    growing, deltas, final = (seen[kind.name] for kind in RequestOutputKind)
    assert len(growing) == len(deltas) == GREEDY["max_tokens"]
    assert [len(one.outputs[0].token_ids) for one in growing] == [1, 2, 3, 4]
    assert growing[-1].outputs[0].text == "".join(one.outputs[0].text for one in deltas) == text
    assert [one.outputs[0].text for one in final] == [text]
    assert all(outputs[-1].finished for outputs in (growing, deltas, final))


def test_another_call_ends_the_engines_requests(llm: VLLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", "Once", VLLMParams(**GREEDY))
    llm.generate("Long", VLLMParams(**GREEDY), use_tqdm=False)
    with pytest.raises(NanoEngineError, match="ended by another call"):
        engine.step()
    engine.add_request("a", "Once", VLLMParams(**GREEDY))
    assert engine.step()[0].request_id == "a"
    engine.abort_request("a")


# --- arguments ------------------------------------------------------------------------------------


def test_every_known_argument_has_its_default() -> None:
    assert non_default_options(DEFAULTS) == {}
    assert non_default_options({"max_lora_rank": 16, "seed": 1, "unknown": None}) == {
        "seed": 1,
        "unknown": None,
    }


def test_a_command_line_sets_only_given_arguments() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--own-option")
    typed = "--model m --max_model_len 256 --enforce-eager --no-enable-prefix-caching"
    args = parser.parse_args([*typed.split(), "--own_option", "a_b"])
    assert args.own_option == "a_b"
    engine_args = EngineArgs.from_cli_args(args)
    options = {"max_model_len": 256, "enforce_eager": True, "enable_prefix_caching": False}
    assert engine_args == EngineArgs("m", **options)
    assert non_default_options(vars(engine_args)) == {"model": "m", **options}
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-unknown"])


def test_engine_args_create_an_engine() -> None:
    engine = VLLMEngine.from_engine_args(EngineArgs(MODEL, max_model_len=64), usage_context=None)
    assert engine.model_config.max_model_len == 64
    del engine.model_executor


# --- nano-vLLM ------------------------------------------------------------------------------------


def test_outputs_of_nano_vllm_are_dicts() -> None:
    params = NanoParams(temperature=0.7)
    assert params.max_tokens == 64
    params.max_tokens = 4
    with NanoLLM(MODEL, kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        (output,) = llm.generate(["Once upon"], params, use_tqdm=False)
        assert output["text"] == llm.get_tokenizer().decode(output["token_ids"])
        assert len(output["token_ids"]) == 4
