"""The course of `nanoengine learn`: writes the small engine without bodies, and checks a day.

    nanoengine/small/ ─ bodies removed ─► DIR/my_engine/     a removed body calls the reference
    check   reference engine + one written function ──► steps ◄── reference engine
            my_engine as it is                       ──► steps ◄── reference engine

Steps are compared field by field: the decisions of the plan, block tables, pool, tokens. Each
function is first checked alone inside the reference engine, so that a difference names it.
`small/course/course.toml` has the functions of each day, workloads, hints and measurements.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import sys
import textwrap
import time
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import nanoengine
from nanoengine.assets import demo_model_path
from nanoengine.errors import ConfigError
from nanoengine.observe.trace_reader import read_trace
from nanoengine.observe.viewer.page import page
from nanoengine.observe.viewer.page_data import page_data
from nanoengine.settings.params import SamplingParams
from nanoengine.small import llm as reference

SMALL = Path(reference.__file__).parent
COURSE = tomllib.loads((SMALL / "course/course.toml").read_text(encoding="utf-8"))
ENGINE, CALL = "my_engine", "return reference."
"""The learner's package, and how a body begins that is not written yet."""
Table = dict[str, Any]
"""A workload of course.toml, or half a step: the decisions of its plan, or its result."""


def write_course(directory: Path) -> None:
    """Writes the texts of all days, and the engine without the bodies that they ask for.

    Raises:
        ConfigError: the directory has a course already, whose solutions would be overwritten.
    """
    engine = directory / ENGINE
    if engine.exists():
        raise ConfigError(f"{engine} exists: give another directory, or remove it to start again")
    engine.mkdir(parents=True)
    for path in SMALL.glob("course/*.md"):
        (directory / path.name).write_bytes(path.read_bytes())
    day_of = {name: day for day, one in enumerate(COURSE["days"], 1) for name in one["functions"]}
    for path in SMALL.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in day_of:
            if name.startswith(f"{path.stem}."):
                text = text.replace(*_without_body(name, day_of[name]))
        text = text.replace("nanoengine.small", ENGINE)
        if CALL in text:
            added = f"from nanoengine.small import {path.stem} as reference\n"
            text = text.replace("annotations\n\n", f"annotations\n\n{added}", 1)
        (engine / path.name).write_text(text, encoding="utf-8")


def _without_body(name: str, day: int) -> tuple[str, str]:
    """The source of a function, and the same with a call of the reference as its body."""
    function = pkgutil.resolve_name(f"nanoengine.small.{name}")
    source = inspect.getsource(function)
    head, docstring, _ = source.split('"""', 2)
    indent = head.rpartition("\n")[2]
    arguments = ", ".join(inspect.signature(function).parameters)
    call = f"{CALL}{name.partition('.')[2]}({arguments})  # day {day}: replace this line"
    return source, f'{head}"""{docstring}"""\n{indent}{call}\n'


def steps_of(work: Table) -> Iterator[Table]:
    """Runs a workload on the demo model; yields the two halves of each step, and one at the end."""
    engine: Any = reference.LLM(demo_model_path(), **work["engine"]).engine
    scheduler, runner, logits = engine.scheduler, engine.executor, list[torch.Tensor]()
    forward, pool = runner.model.forward, scheduler.block_manager.pool

    def observed(batch: Any) -> torch.Tensor:
        logits.append(forward(batch))
        return logits[-1]

    runner.model.forward = observed
    engine.add_requests(work["prompts"], SamplingParams(**work["params"]))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        ids = {seq.row: seq.seq_id for seq in scheduler.running}
        rows = [ids.get(row) for row in plan.rows]
        spans = zip(rows, plan.num_scheduled_tokens, plan.starts, strict=True)
        yield {
            "preempted": [gone.seq_id for gone in plan.preempted],
            "admitted": [f"{n.num_cached_tokens} cached of seq {n.seq_id}" for n in plan.admitted],
            "computed": [f"{n} from {start} of seq {seq}" for seq, n, start in spans],
            "samples": [seq for seq, n in zip(rows, plan.num_logits, strict=True) if n],
            "tables": {seq.seq_id: list(seq.block_table) for seq in scheduler.running},
            "released": len(plan.released),
            "pool": str(pool),
        }
        result = runner.launch(plan).result()
        scheduler.commit(result)
        top = logits.pop().topk(3).indices.tolist()
        yield {"top tokens": top, "sampled": result.token_ids, "pool": str(pool)}
    yield {"unfinished": "none"}


def first_difference(expected: list[Any]) -> tuple[Table, int, list[str]] | None:
    """Runs workloads until a step differs from the expected one.

    Args:
        expected: workloads with the halves of their steps.

    Returns:
        The workload, the step, and lines that show both halves; None if there is no difference.
    """
    for work, halves in expected:
        found = steps_of(work)
        for half, want in enumerate(halves):
            step, when = half // 2, ("plan", "result")[half % 2]
            lines = [f'step {step} of "{work["name"]}", its {when} (yours | reference):']
            try:
                got = next(found)
            except (Exception, KeyboardInterrupt):  # Why Ctrl-C: it shows an endless loop.
                return work, step, lines + traceback.format_exc(limit=-4).splitlines()
            if wrong := [name for name in want if got.get(name) != want[name]]:
                for name, value in want.items():
                    text = f"{name:<12}{got.get(name)!s:<40} | {value}".replace("'", "")
                    lines.append(f"{'->' if name in wrong else '':<3}{text}")
                return work, step, [*lines, f"check {wrong[0]}: {COURSE['hints'][wrong[0]]}"]
    return None


def check(directory: Path, day: int) -> bool:
    """Prints which functions of a day equal the reference; if all do, measures what they gain.

    Returns:
        Whether all do.

    Raises:
        ConfigError: the directory has no course, or the course has no such day.
    """
    if not 1 <= day <= len(COURSE["days"]):
        raise ConfigError(f"check={day} is not a day: give 1 to {len(COURSE['days'])}")
    if not (directory / ENGINE).is_dir():
        raise ConfigError(f"{directory} has no {ENGINE}: `nanoengine learn {directory}` writes it")
    sys.path.insert(0, str(directory.resolve()))
    expected = [(work, list(steps_of(work))) for work in COURSE["works"]]
    is_done = True
    for name in [*COURSE["days"][day - 1]["functions"], "llm.LLM"]:
        yours = pkgutil.resolve_name(f"{ENGINE}.{name}")
        if name == "llm.LLM" and not is_done:
            break
        if CALL in inspect.getsource(yours):
            is_done = False
            print(f"not written  {name}")
            continue
        with mock.patch(f"nanoengine.small.{name}", yours):
            difference = first_difference(expected)
        print(f"{'differs' if difference else 'equal':<13}{name}")
        if difference is not None:
            is_done, path = False, directory.resolve() / f"day{day}.html"
            _write_page(path, *difference)
            shown = f"{path.as_uri()}#step={difference[1]} shows the reference's run"
            print(textwrap.indent("\n".join([*difference[2], shown]), "    "))
    if not is_done:
        return False
    print("measured with your engine on this machine:")
    with mock.patch("nanoengine.small.llm.LLM", yours):
        for rung in COURSE["days"][day - 1]["rungs"]:
            print(_measure(rung))
    print(f"day {day} is done")
    return True


def _write_page(path: Path, work: Table, step: int, lines: list[str]) -> None:
    """Writes the reference's run as the viewer's page, with the difference in the step's text.

    The run is traced in the large engine, which plans the same steps with these settings; it forks
    the second completion of a prompt.
    """
    options = COURSE["page"] | work["engine"]
    options["num_kv_blocks"], trace = options.pop("num_blocks"), path.with_suffix(".trace")
    with nanoengine.LLM(demo_model_path(), trace=trace, **options) as llm:
        llm.generate(work["prompts"], SamplingParams(**work["params"]), use_tqdm=False)
    data = page_data(read_trace(trace), title=f"{work['name']}: the reference")
    differing = [line for line in lines if line[:3] != "   "][-8:]  # as many as the viewer shows
    data.meta["notes"] = [[step, line] for line in differing]
    path.write_text(page(data), encoding="utf-8")


def _measure(rung: Table) -> str:
    """Runs the prompts of a rung; returns its label and their speed."""
    own, shared, grow, count = (rung.get(name, 0) for name in ("own", "shared", "grow", "count"))
    prompts = [" Mia" * shared + f" {i}" + " Tom" * (own + i * grow) for i in range(count)]
    params = SamplingParams(temperature=0, max_tokens=rung["max_tokens"], ignore_eos=True)
    module, options = (nanoengine, {"use_tqdm": False}) if "large" in rung else (reference, {})
    llm, steps = module.LLM(demo_model_path(), **rung["engine"]), list[tuple[float, int]]()
    llm.generate(["Once"], params, **options)  # warms up
    # The large engine does not call it, so only the speed is known there.
    llm.engine.watch = lambda plan: steps.append((time.perf_counter(), plan.num_tokens))
    start = time.perf_counter()
    llm.generate(prompts, params, **options)
    steps.append((time.perf_counter(), 0))
    speed = count * rung["max_tokens"] / (steps[-1][0] - start)
    text = f"    {rung['label']:<50}{speed:>6,.0f} tokens/s"
    if len(steps) == 1:
        return text
    longest = max(1000 * (end - begin) for (begin, _), (end, _) in itertools.pairwise(steps))
    num_computed, num_steps = sum(n for _, n in steps), len(steps) - 1
    return f"{text}, {num_computed:>5,} computed in {num_steps:>3} steps of up to {longest:.0f} ms"
