"""The course of `nanoengine learn`: writes the small engine without bodies, and checks a day.

    nanoengine/small/ ─ bodies removed ─► DIR/my_engine/     a removed body calls the reference
    check   reference engine + one written function ──► steps ◄── reference engine
            my_engine as it is                       ──► steps ◄── reference engine

A step is compared field by field: the decisions of its plan, block tables, pool, logits, tokens.
Each function is first checked alone inside the reference engine, so a difference names it.
`small/course/course.toml` has the functions of each day, workloads, hints and measurements.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from nanoengine import small
from nanoengine.assets import demo_model_path
from nanoengine.core.plan import StepResult
from nanoengine.core.sequence import Request
from nanoengine.errors import ConfigError
from nanoengine.settings.params import SamplingParams
from nanoengine.small.llm import LLM

SMALL = Path(small.__file__).parent
COURSE = SMALL / "course"
ENGINE = "my_engine"

Fields = dict[str, Any]
"""A half of a step: what the plan decides, or what the step's commit leaves."""


@functools.cache
def contents() -> dict[str, Any]:
    """The tables of course.toml."""
    return tomllib.loads((COURSE / "course.toml").read_text(encoding="utf-8"))


# --- the files ------------------------------------------------------------------------------------


def write_course(directory: Path) -> None:
    """Writes the texts of all days and the engine without their bodies.

    Raises:
        ConfigError: the directory has a course already, whose solutions would be overwritten.
    """
    engine = directory / ENGINE
    if engine.exists():
        raise ConfigError(f"{engine} exists: give another directory, or remove it to start again")
    engine.mkdir(parents=True)
    for text in COURSE.glob("*.md"):
        (directory / text.name).write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    day_of = {name: day for day, one in enumerate(contents()["days"], 1) for name in one["functions"]}
    for path in SMALL.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        days = {n.partition(".")[2]: d for n, d in day_of.items() if n.startswith(f"{path.stem}.")}
        written = _without_bodies(source, path.stem, days)
        (engine / path.name).write_text(written, encoding="utf-8")


def _without_bodies(source: str, module: str, day_of: dict[str, int]) -> str:
    """The source of one file, in which each of these functions calls the reference."""
    tree, lines = ast.parse(source), source.splitlines()
    for name, node in reversed(list(_functions(tree))):
        if name in day_of:
            docstring, *_, last = node.body
            arguments = ", ".join(one.arg for one in node.args.args)
            call = f"return {_call(name)}{arguments})  # day {day_of[name]}: replace this line"
            lines[docstring.end_lineno : last.end_lineno] = [" " * docstring.col_offset + call]
    lines = [line.replace("nanoengine.small", ENGINE) for line in lines]
    if day_of:
        end = max(node.end_lineno or 0 for node in tree.body if isinstance(node, ast.ImportFrom))
        lines.insert(end, f"from nanoengine.small import {module} as reference")
    return "\n".join(lines) + "\n"


def _call(name: str) -> str:
    """How a removed body begins: it identifies functions that are not written yet."""
    return f"reference.{name}("


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their names, in the order of the file."""
    for node in tree.body:
        for inner in [node, *getattr(node, "body", [])] if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield (inner.name if inner is node else f"{node.name}.{inner.name}"), inner  # type: ignore[attr-defined]


# --- runs -----------------------------------------------------------------------------------------


def steps_of(llm_class: type[LLM], work: dict[str, Any]) -> Iterator[Fields]:
    """Runs a workload on the demo model; yields two halves per step, and one at the end."""
    llm = llm_class(demo_model_path(), **work["engine"])
    scheduler, runner = llm.engine.scheduler, llm.engine.executor
    model, pool, logits = runner.model, scheduler.block_manager.pool, list[torch.Tensor]()
    forward = model.forward

    def observed(batch: Any) -> torch.Tensor:
        logits.append(forward(batch))
        return logits[-1]

    model.forward = observed
    sequences = llm.engine.add_requests(work["prompts"], SamplingParams(**work["params"]))
    yield {"queued": [(seq.seq_id, seq.seed) for seq in sequences]}
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        ids = {seq.row: seq.seq_id for seq in scheduler.running}
        counts = zip(plan.starts, plan.num_scheduled_tokens, strict=True)
        rows = [ids.get(row) for row in plan.rows]
        yield {
            "preempted": [gone.seq_id for gone in plan.preempted],
            "admitted": [f"seq {n.seq_id}, {n.num_cached_tokens} cached" for n in plan.admitted],
            "computed": {seq: f"{n} from {start}" for seq, (start, n) in zip(rows, counts, strict=True)},
            "samples": [seq for seq, n in zip(rows, plan.num_logits, strict=True) if n],
            "tables": {seq.seq_id: list(seq.block_table) for seq in scheduler.running},
            "rows": (ids, sorted(plan.released)),
            "pool": str(pool),
        }
        result = runner.launch(plan).result()
        finished = scheduler.commit(result)
        yield {
            "logits": logits.pop() if logits else None,
            "sampled": dict(zip(rows, result.token_ids, strict=True)),
            "finished": [(seq.seq_id, seq.finish_reason) for seq in finished],
            "pool": str(pool),
        }
    yield {"unfinished": 0}


class Difference(NamedTuple):
    """The first half of a step that differs from the reference's.

    Attributes:
        half: index in the halves of the run; 0 is before step 0.
        error: the traceback if the learner's code raised instead.
    """

    work: dict[str, Any]
    half: int
    yours: Fields
    reference: Fields
    error: str = ""

    @property
    def step(self) -> int:
        return max(self.half - 1, 0) // 2

    @property
    def names(self) -> list[str]:
        """The fields that differ."""
        return [name for name, want in self.reference.items() if not _same(self.yours.get(name), want)]

    def lines(self) -> Iterator[str]:
        """Both halves side by side, and a hint for the first difference."""
        when = "plan" if self.half % 2 else "result"
        yield f'step {self.step} of "{self.work["name"]}", its {when}:'
        if self.error:
            yield from self.error.rstrip().splitlines()
            return
        yield f"    {'':<12}{'yours':<40}  reference"
        for name, want in self.reference.items():
            mark, got = "->" if name in self.names else "", self.yours.get(name)
            yield f"  {mark:<2}{name:<12}{_shown(got):<40}  {_shown(want)}"
        yield f"check {self.names[0]}: {contents()['hints'][self.names[0]]}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, atol=1e-3)
    return bool(type(one) is type(other) and one == other)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        first = ", ".join(f"{number:.2f}" for number in value.flatten()[:3].tolist())
        return f"{list(value.shape)}: {first}, ..."
    return str(value)


def first_difference(
    llm_class: type[LLM], work: dict[str, Any], expected: list[Fields]
) -> Difference | None:
    """Runs a workload until its steps differ from the expected ones."""
    found = steps_of(llm_class, work)
    for half, want in enumerate(expected):
        try:
            got = next(found)
        except Exception:
            return Difference(work, half, {}, want, traceback.format_exc(limit=-4))
        difference = Difference(work, half, got, want)
        if difference.names:
            return difference
    return None


# --- a day ----------------------------------------------------------------------------------------


def load(directory: Path) -> dict[str, ModuleType]:
    """Imports the learner's engine anew; module name -> module."""
    for name in [name for name in sys.modules if name.partition(".")[0] == ENGINE]:
        del sys.modules[name]
    stems = [path.stem for path in SMALL.glob("[!_]*.py")]
    importlib.invalidate_caches()
    sys.path.insert(0, str(directory))
    sys.dont_write_bytecode, was = True, sys.dont_write_bytecode
    try:
        return {stem: importlib.import_module(f"{ENGINE}.{stem}") for stem in stems}
    finally:
        sys.path.remove(str(directory))
        sys.dont_write_bytecode = was


def check(directory: Path, day: int) -> Iterator[str]:
    """Yields the lines of a day's report; the last one begins with "day N is done" if it is."""
    if not (directory / ENGINE).is_dir():
        raise ConfigError(f"{directory} has no {ENGINE}: write it with `nanoengine learn {directory}`")
    modules, names = load(directory), contents()["days"][day - 1]["functions"]
    expected = [(work, list(steps_of(LLM, work))) for work in contents()["works"]]
    engine, failed = modules["llm"].LLM, False
    for name in [*names, f"{ENGINE}.LLM"]:
        if name == f"{ENGINE}.LLM":
            if failed:
                return
            found = (first_difference(engine, *one) for one in expected)
        elif _call(name.partition(".")[2]) in inspect.getsource(_find(modules, name)):
            failed = True
            yield f"not written  {name}"
            continue
        else:
            found = _alone(modules, name, expected)
        difference = next(filter(None, found), None)
        yield f"{'differs' if difference else 'equal':<13}{name}"
        if difference is not None:
            failed = True
            yield from (f"    {line}" for line in difference.lines())
            yield f"    {write_page(directory / f'day{day}.html', difference)}"
    if failed:
        return
    yield "measured on this machine:"
    for rung in contents()["rungs"]:
        if rung["day"] == day:
            yield f"    {rung['label']:<50}{measure(engine, rung)}"
    yield f"day {day} is done"


def _find(modules: dict[str, ModuleType], name: str) -> Any:
    module, *names = name.split(".")
    return functools.reduce(getattr, names, modules[module])


def _alone(modules: dict[str, ModuleType], name: str, expected: Any) -> Iterator[Difference | None]:
    """Runs all workloads in the reference engine with one of the learner's functions."""
    reference = {stem: sys.modules[f"nanoengine.small.{stem}"] for stem in modules}
    owner, _, attribute = name.rpartition(".")
    place = _find(reference, owner)
    original = getattr(place, attribute)
    setattr(place, attribute, _find(modules, name))
    try:
        yield from (first_difference(LLM, *one) for one in expected)
    finally:
        setattr(place, attribute, original)


def write_page(path: Path, difference: Difference) -> str:
    """Writes the reference's run as the viewer's page, which opens at the step that differs.

    The large engine's core plans the same steps, so a trace of it shows the reference's run.
    """
    from nanoengine.bench.simulator import make_scheduler
    from nanoengine.observe.trace import Trace
    from nanoengine.observe.trace_reader import read_trace
    from nanoengine.observe.viewer.page import page
    from nanoengine.observe.viewer.page_data import page_data

    work = difference.work
    llm = LLM(demo_model_path(), **work["engine"])
    params = SamplingParams(**work["params"])
    sequences = llm.engine.add_requests(work["prompts"], params)
    scheduler = make_scheduler(watermark_frac=0.0, **work["engine"])
    with Trace(path.with_suffix(".trace"), scheduler):
        for seq in sequences:
            scheduler.add(
                Request(
                    str(seq.seq_id), list(seq.token_ids), dataclasses.replace(params, n=1),
                    arrival=seq.seq_id, seed=seq.seed, max_num_tokens=seq.max_num_tokens,
                    stop_ids=dict.fromkeys(seq.stop_ids),
                )
            )  # fmt: skip
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            result = llm.engine.executor.launch(plan).result()
            scheduler.commit(plan, result)
    data = page_data(read_trace(path.with_suffix(".trace")), title=f"{work['name']}: reference")
    data.meta["start"] = difference.step
    data.meta["notes"].append([difference.step, "yours differs here"])
    path.write_text(page(data), encoding="utf-8")
    return f"the reference's run, opened at this step: {path}"


def measure(llm_class: type[LLM], rung: dict[str, Any]) -> str:
    """Runs a rung's prompts, each with 32 output tokens; returns its speed as text."""
    size, times, num_computed = rung["prompts"], list[float](), list[int]()

    def watch(plan: Any) -> None:
        times.append(time.perf_counter())
        num_computed.append(plan.num_tokens)

    shared, num_own = size.get("shared", 0), size["length"] - size.get("shared", 0)
    prompts = [
        [*range(300, 300 + shared), *(500 + (37 * number + 7 * i) % 900 for i in range(num_own))]
        for number in range(size["count"])
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    num_tokens = 32 * len(prompts)
    if size.get("recompute"):
        prompts = [prompts[0] + [5] * number for number in range(32)]
        params = dataclasses.replace(params, max_tokens=1)
    if rung.get("large"):
        import nanoengine

        with nanoengine.LLM(demo_model_path(), device="cpu", **rung["engine"]) as large:
            start = time.perf_counter()
            large.generate(prompts, params, use_tqdm=False)
            return f"{num_tokens / (time.perf_counter() - start):>6,.0f} tokens/s"
    llm = llm_class(demo_model_path(), watch=watch, **rung["engine"])
    llm.engine.add_requests(prompts, params)
    llm.engine.run()
    times.append(time.perf_counter())
    longest = max(end - start for start, end in itertools.pairwise(times))
    speed = num_tokens / (times[-1] - times[0])
    return (
        f"{speed:>6,.0f} tokens/s, {sum(num_computed):>5,} tokens computed in"
        f" {len(num_computed):>3} steps, the longest {1000 * longest:.0f} ms"
    )
