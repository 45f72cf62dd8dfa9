"""Programs written for vLLM run on the demo model with only the import changed, and their
`LLM(...)` calls succeed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, ConfigError, ModelError, SamplingParams
from nanoengine.assets import demo_model_path
from tests.support.quantized_checkpoints import awq, write_quantized
from tests.support.thread_ranks import thread_ranks_fixture as thread_ranks_fixture

CLIENTS = sorted(
    path for path in (Path(__file__).parent / "clients").glob("*.py") if path.stem != "__init__"
)
IMPORT = re.compile(r"^from (?:nano)?vllm\b", re.MULTILINE)


def test_there_are_programs_of_many_kinds() -> None:
    assert len(CLIENTS) >= 6


@pytest.mark.parametrize("client", CLIENTS, ids=lambda path: path.stem)
def test_a_vllm_program_runs_after_changing_its_import(
    client: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, imports = IMPORT.subn("from nanoengine", client.read_text(encoding="utf-8"))
    assert imports >= 1
    assert "nanoengine" not in client.read_text(encoding="utf-8")
    moved = tmp_path / client.name
    moved.write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(moved), str(demo_model_path())])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no effect in nanoengine")
        runpy.run_path(str(moved), run_name="__main__")
    assert len(capsys.readouterr().out.split()) >= 4


# --- constructors ---------------------------------------------------------------------------------

# tests/docs/test_moving.py tests each argument alone; clients/constructor.py tests many at once.
CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "half": {"dtype": "half", "enforce_eager": True, "gpu_memory_utilization": 0.9},
    "bfloat16": {"dtype": "bfloat16", "gpu_memory_utilization": 0.6, "max_model_len": 512},
    "awq": {"model": "awq", "quantization": "awq", "gpu_memory_utilization": 0.9},
    "revision": {"revision": "main", "tokenizer": str(demo_model_path())},
    "steps": {"max_num_batched_tokens": 4096, "enable_chunked_prefill": True, "block_size": 16},
    "four-ranks": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model directories: an AWQ checkpoint with a tokenizer, and one for images and text."""
    folder = tmp_path_factory.mktemp("models")
    config = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    }  # fmt: skip
    write_quantized(folder, "llama", config, awq, vocab_size=1440)
    media = folder / "media"
    media.mkdir()
    for directory in (folder / "quantized", media):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / name, directory)
    (media / "config.json").write_text(
        json.dumps({"architectures": ["WhisperForConditionalGeneration"]}), encoding="utf-8"
    )
    return {"awq": str(folder / "quantized"), "media": str(media), "demo": str(demo_model_path())}


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.filterwarnings("ignore:no effect in nanoengine")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructor_calls_of_vllm_users_run(name: str, models: dict[str, str]) -> None:
    options = dict(CONSTRUCTORS[name])
    with LLM(models[options.pop("model", "demo")], **options) as llm:
        (output,) = llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.error is None
        assert 1 <= len(output.outputs[0].token_ids) <= 2


@pytest.mark.filterwarnings("ignore:no effect in nanoengine")
def test_unsupported_models_and_quantization_raise(models: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="unsupported arch"):
        LLM(models["media"], limit_mm_per_prompt={"image": 0})
    for model, option in (("demo", "awq"), ("demo", "gptq"), ("awq", "gptq_marlin")):
        with pytest.raises(ConfigError, match=f"'{option[:4].rstrip('_')}.* contradicts"):
            LLM(models[model], quantization=option)
