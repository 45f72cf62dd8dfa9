"""The kernels' instruction set: detection, selection, and a separate code cache for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoengine import LLM
from nanoengine.assets import demo_model_path
from nanoengine.cli.info import device_lines
from nanoengine.errors import ConfigError
from nanoengine.kernels.isa import (
    ALL,
    CURRENT,
    ISAS,
    adapt_to_llvm,
    choose,
    cpu_features,
    target_features,
)
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.settings.config import EngineConfig

# Tests that start a process, which loads torch.
SUBPROCESS = pytest.mark.guards(
    "nanoengine/kernels/isa.py",
    "nanoengine/kernels/jit.py",
    "nanoengine/runner/options.py",
    "nanoengine/ranks/*.py",
)

ROOT = Path(__file__).resolve().parents[2]

ZEN3 = {"x86_64", "avx", "avx2", "fma", "f16c", "sse4.1"}
ALDER_LAKE = ZEN3 | {"avxvnni"}
SKYLAKE_SERVER = ZEN3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
ICE_LAKE = SKYLAKE_SERVER | {"avx512vnni", "avx512vbmi"}
ZEN5 = ICE_LAKE | {"avx512bf16", "avxvnni"}


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in its own process, because the choice is made once per process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT, env={"PATH": "", **variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (ZEN5, "avx512_bf16"), (ICE_LAKE, "avx512_vnni"), (SKYLAKE_SERVER, "avx512"),
        (ALDER_LAKE, "avx2_vnni"), (ZEN3, "avx2"), ({"aarch64"}, "neon"), ({"x86_64"}, "generic"),
        (ZEN3 - {"fma"}, "generic"), (SKYLAKE_SERVER - {"avx512bw"}, "avx2"),
    ],
)  # fmt: skip
def test_a_cpu_gets_its_best_instruction_set(features, name):
    assert choose(None, features).name == name


def test_a_smaller_instruction_set_can_be_chosen_but_not_a_missing_one():
    for name in ("avx512_vnni", "avx512", "avx2_vnni", "avx2", "generic", "generic_512"):
        assert choose(name, ZEN5).name == name
    with pytest.raises(ConfigError, match=r"'avx512' is not .* CPU: use one of avx2, generic, gen"):
        choose("avx512", ZEN3)
    with pytest.raises(ConfigError, match=r"got 'axv2'; did you mean 'avx2'\?"):
        choose("axv2", ZEN5)


def test_the_compiler_uses_only_the_chosen_instruction_set():
    assert target_features(choose("avx2", ZEN5)) == "+avx2,+f16c,+fma"
    assert target_features(choose("neon", {"aarch64"})) == ""


def test_a_compiler_without_vnni_gets_the_best_kernels_without_vnni():
    """LLVM 20, of numba 0.65, aborts the process when it compiles the kernels' `vpdpbusd`."""
    (with_bf16,) = (isa for isa in ALL if isa.name == "avx512_bf16")
    assert adapt_to_llvm(with_bf16, (22, 1, 0)) is with_bf16
    without = adapt_to_llvm(with_bf16, (20, 1, 8))
    assert (without.byte_dots, without.byte_bits) == ("vpmaddubsw", 256)
    assert (without.name, without.bf16_dots) == ("avx512_bf16", "vdpbf16ps")
    assert "numba 0.66 or later" in str(without) and "numba" not in str(with_bf16)
    for isa in ALL:
        assert adapt_to_llvm(isa, (20, 1, 8)).byte_dots != "vpdpbusd"
        assert "numba" not in str(isa)


LACKING = {isa.name for isa in ISAS if not set(isa.needs) <= cpu_features()}


@SUBPROCESS
def test_an_engine_uses_the_chosen_instruction_set():
    code = (
        "from nanoengine import LLM\n"
        "from nanoengine.assets import demo_model_path\n"
        "for isa in ('generic_512', None, 'generic_512'):\n"
        "    LLM(demo_model_path(), cpu_isa=isa, num_kv_blocks=8).close()\n"
        "    from nanoengine.kernels.isa import CURRENT\n"
        "    print(CURRENT.name)\n"
    )
    done = python(code)
    assert done.stdout.split() == ["generic_512"] * 3, done.stderr


def test_a_second_engine_cannot_choose_another_instruction_set():
    """Kernels are compiled once per process, so a second engine cannot choose another set."""
    with pytest.raises(ConfigError, match=f"'generic_256': .* are compiled for '{CURRENT.name}'"):
        LLM(demo_model_path(), cpu_isa="generic_256")
    assert CURRENT.name != "generic_256"


@pytest.mark.parametrize("name", ["neon" if "neon" in LACKING else "avx2", "sse9"])
def test_an_engine_rejects_an_instruction_set_that_the_cpu_lacks(name):
    with pytest.raises(ConfigError, match=f"cpu_isa.*'{name}'"):
        LLM(demo_model_path(), cpu_isa=name)


@SUBPROCESS
def test_a_rank_uses_the_chosen_instruction_set():
    """A rank builds its runner only from the settings that it receives."""
    config, cpu = EngineConfig(model="any", cpu_isa="sse9"), torch.device("cpu")
    options = RunnerOptions(
        config=config, model_config=None, directory=None, device=cpu, dtype=torch.float32,
        backend="cpu",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="'sse9'"):
        ModelRunner(options)


@SUBPROCESS
def test_code_for_two_instruction_sets_is_cached_separately(tmp_path):
    """Otherwise each change of the instruction set would compile all kernels again."""
    code = (
        "import numpy as np; from nanoengine.kernels import isa; isa.use({isa!r});"
        "from nanoengine.kernels.cpu_linear import round_to_bf16 as kernel;"
        "a = np.ones((1, 4), np.float32); kernel(a, 1);"
        "print(sum(kernel.stats.cache_hits.values()))"
    )
    hits = [
        python(code.format(isa=isa), NANOENGINE_CACHE=str(tmp_path)).stdout.strip()
        for isa in ("generic", "generic_512", "generic", "generic_512")
    ]
    assert hits == ["0", "0", "1", "1"]


def test_info_shows_the_instruction_set():
    _, current, choice = device_lines(torch.device("cpu"))
    assert current == f"kernels for {CURRENT}"
    assert choice.startswith("cpu_isa may be ") and choice.endswith("generic_256, generic_512")
    assert f" {CURRENT.name}, " in choice and not set(choice.split(", ")) & LACKING


def test_info_shows_the_number_of_threads_and_its_reason(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert "2 threads (torch's default for 3 available cores;" in next(device_lines(cpu))
    with monkeypatch.context() as quota:
        quota.setattr("nanoengine.settings.cores.cpu_quota", lambda _: 1.5)
        quota.setattr("nanoengine.kernels.threads.cpu_quota", lambda: 1.5)
        assert "2 threads (the control group's quota of 1.5 cores;" in next(device_lines(cpu))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "2 threads (OMP_NUM_THREADS=2)" in next(device_lines(cpu))
