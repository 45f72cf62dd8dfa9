"""Limits on size: lines of the package, files and lines on the path of one prompt, and modules that
are loaded at startup.

The limits only go down. A change that exceeds one removes something first.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanoengine"

PACKAGE_LINES = 37_269
"""Maximum number of code lines of the package (`make loc`). It only goes down: a change that adds
lines removes others."""

MAX_TOP_LEVEL_MODULES = 8
SPINE_FILES, SPINE_LINES, SPINE_SHARE = 32, 3_400, 0.28
"""Files on the path of one plain prompt, their code lines, and the share of these lines that runs.
The aim was a share of 0.30. The lines that a call does not run are imports, signatures, fields,
shutdown and error handling."""
STEP_CALLS, STEP_CHANGES = 28, 14
"""Calls per plain decode step outside the model, and how often the next one is in another file."""

LOADED = [
    "attention.base",
    "attention.batch",
    "attention.naive",
    "build",
    "checkpoint.config",
    "checkpoint.families.dense",
    "checkpoint.families.family",
    "checkpoint.files",
    "checkpoint.find",
    "checkpoint.config_reader",
    "checkpoint.layer_config",
    "checkpoint.quantization",
    "checkpoint.rope",
    "checkpoint.slots",
    "checkpoint.weights",
    "core.block_manager",
    "core.block_pool",
    "core.interfaces",
    "core.engine_stats",
    "core.layout",
    "core.make",
    "core.plan",
    "core.policies",
    "core.prefix_cache",
    "core.prefix_tree",
    "core.requests",
    "core.row_allocator",
    "core.scheduler",
    "core.sequence",
    "core.stats",
    "core.waiting",
    "engine",
    "errors",
    "features.logits_processors",
    "fork_guard",
    "layers.attention",
    "layers.collectives",
    "layers.embedding",
    "layers.kernels",
    "layers.layer",
    "layers.linear",
    "layers.norm",
    "layers.rotary",
    "llm",
    "llm_mixins",
    "locking",
    "models.decoder",
    "models.loader",
    "outputs",
    "runner.sampling.greedy",
    "runner.kv_cache",
    "runner.memory",
    "runner.model_runner",
    "runner.options",
    "runner.input_batch",
    "runner.start",
    "runner.step",
    "runner.transfers",
    "settings.checks",
    "settings.files",
    "settings.config",
    "settings.cores",
    "settings.params",
    "settings.structured",
    "settings.tiers",
    "text.load_tokenizer",
    "text.prompt_forms",
    "text.prompts",
    "text.tokenizer",
    "text.tokenizer_file",
    "version",
]
"""All modules of the package that a plain greedy `generate` loads with attention_backend="naive":
unused features are not loaded. `__init__` modules are left out."""
LOADED_ON_A_CPU = [
    "attention.cpu",
    "layers.cpu_decoder",
    "layers.packed",
    "layers.placement",
    "models.cpu",
]
"""Further modules that the default on a CPU loads, without the compiled functions in kernels/.
It does not load attention.naive."""
LOADED_LINES, LOADED_LINES_ON_A_CPU = 9_500, 12_000

GENERATE = """
import json, sys
from nanoengine import LLM, SamplingParams
options = {"attention_backend": sys.argv[2], "device": "cpu", "num_kv_blocks": 64}
with LLM(sys.argv[1], **options) as llm:
    llm.generate("Tom", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
found = {n: getattr(m, "__file__", None) for n, m in sys.modules.items()}
print(json.dumps({n: f for n, f in found.items() if n.partition(".")[0] == "nanoengine" and f}))
print(json.dumps(sorted({n.partition(".")[0] for n in found})))
"""


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


loc = tool("loc")


def lines_of(path: Path | str) -> int:
    return loc.measure(Path(path).read_text(encoding="utf-8")).lines


def test_the_package_stays_within_its_lines():
    lines = sum(lines_of(path) for path in PACKAGE.rglob("*.py"))
    assert lines <= PACKAGE_LINES, (
        f"the package has {lines - PACKAGE_LINES} code lines too many: remove as many. `make loc`"
        " lists all files; `git diff --stat main -- nanoengine` shows where they were added"
    )


def test_few_modules_are_at_the_top_level():
    outside = {"__init__.py", "__main__.py", "version.py"}
    found = {path.name for path in PACKAGE.glob("*.py")} - outside
    assert len(found) <= MAX_TOP_LEVEL_MODULES, f"move one of these into a package: {sorted(found)}"


def test_the_path_of_one_prompt_is_short():
    spine = tool("spine").measure()
    hint = (
        "a plain prompt runs more than before. Move what it does not need into a file that is"
        " imported where the feature is used; `python tools/spine.py --calls` lists the path"
    )
    assert len(spine.files) <= SPINE_FILES, hint
    assert spine.lines <= SPINE_LINES, hint
    assert spine.share >= SPINE_SHARE, hint
    assert spine.decode.calls <= STEP_CALLS, hint
    assert spine.decode.changes <= STEP_CHANGES, hint
    paths = {file.path for file in spine.files}
    assert {"llm.py", "engine.py", "core/scheduler.py", "core/block_manager.py"} <= paths
    assert {"runner/model_runner.py", "models/decoder.py", "attention/naive.py"} <= paths


@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_a_plain_generate_loads_only_what_it_needs(backend):
    from nanoengine.assets import demo_model_path

    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(demo_model_path()), backend],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, tops = map(json.loads, done.stdout.splitlines()[-2:])
    expected = {f"nanoengine.{name}" for name in LOADED}
    max_lines = LOADED_LINES
    unneeded = {"triton", "transformers", *(["numba"] if backend == "naive" else [])}
    assert unneeded.isdisjoint(tops), "import these packages inside the functions that need them"
    if backend == "cpu":
        expected -= {"nanoengine.attention.naive"}
        expected |= {f"nanoengine.{name}" for name in LOADED_ON_A_CPU}
        max_lines = LOADED_LINES_ON_A_CPU
    modules = {name for name, file in ours.items() if not file.endswith("__init__.py")}
    modules = {name for name in modules if ".kernels." not in name}
    assert modules == expected, (
        f"a plain generate loads {sorted(modules - expected)}, which are not in LOADED: import them"
        " where the feature is used, or add them if every prompt needs them; and it does not load"
        f" {sorted(expected - modules)}: remove them from LOADED"
    )
    assert sum(map(lines_of, ours.values())) <= max_lines, (
        "a plain generate loads more lines: move what it does not need into a file that is imported"
        " where the feature is used"
    )


def test_class_names_are_unique():
    """Classes of `small/` deliberately have the names of their counterparts in the large engine."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if "small" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(path.relative_to(PACKAGE).as_posix())
    repeated = {name: files for name, files in found.items() if len(files) > 1}
    assert repeated == {}, "rename one class of each pair"
