"""The viewer's page as a file: its contents, its sources, and the input that it refuses.

test_viewer_browser.py tests it in a browser.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.cli.main import main
from nanoengine.core.plan import StepPlan
from nanoengine.core.sequence import Sequence
from nanoengine.errors import TraceError
from nanoengine.observe.trace_reader import Replay, read_trace
from nanoengine.observe.viewer import page_data as page_data_module
from nanoengine.observe.viewer.page import SOURCES, packed, page
from nanoengine.observe.viewer.page_data import (
    DROP,
    EVICT,
    INDEX,
    KIND_SHIFT,
    TAKE,
    PageData,
    page_data,
)

SAMPLE = Path(__file__).parent / "sample.trace.gz"
MAX_PAGE_BYTES = 300_000
"""Limit on the page's size without its data."""
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files of uPlot 1.6.32 as published by its authors."""


class Replayed:
    """Follows the events of a page as viewer.js does."""

    def __init__(self, data: PageData) -> None:
        self.data = data
        self.refs = [0] * data.meta["header"]["numBlocks"]
        self.content: dict[int, int] = {}
        self.tables: dict[int, dict[tuple[int, int], int]] = {}

    def frame(self, number: int) -> None:
        first, last = self.data.columns["eventsOf"][number : number + 2]
        for e in range(first, last):
            what, lane, argument = self.data.columns["events"][3 * e : 3 * e + 3]
            kind, block = what >> KIND_SHIFT, what & ((1 << KIND_SHIFT) - 1)
            place = argument >> 24, argument & 0xFFFFFF
            if kind == TAKE:
                self.refs[block] += 1
                self.tables.setdefault(lane, {})[place] = block
            elif kind == DROP:
                self.refs[block] -= 1
                if self.tables[lane].get(place) == block:
                    del self.tables[lane][place]
            elif kind == INDEX:
                self.content[block] = argument
            else:
                assert kind == EVICT
                del self.content[block]


class States:
    """State per step of a replay: reference counts, contents and tables of running sequences
    after its plan, and their token counts after its commit."""

    def __init__(self, replay: Replay) -> None:
        self.scheduler = replay.scheduler
        self.of: dict[int, tuple[list[int], dict[int, bytes], dict[int, Any]]] = {}
        self.running: list[Sequence] = []
        replay.run(self)

    def on_plan(self, plan: StepPlan) -> None:
        blocks, self.running = self.scheduler.block_manager.pool.blocks, [*self.scheduler.running]
        tables = {
            seq.seq_id: {
                (group, index): block
                for group, table in enumerate(seq.block_tables)
                for index, block in enumerate(table)
                if block
            }
            for seq in self.running
        }
        contents = {b.block_id: b.prefix.digest for b in blocks if b.prefix is not None}
        self.of[plan.step] = [block.ref_count for block in blocks], contents, tables

    def on_step(self, plan: StepPlan, result: object, scheduler: object) -> None:
        tables = self.of[plan.step][2]
        tables |= {seq.seq_id: (tables[seq.seq_id], len(seq.token_ids)) for seq in self.running}


@pytest.mark.parametrize(("max_frames", "first"), [(1000, 0), (75, 0), (1000, 60)])
def test_events_rebuild_references_contents_and_tables(
    monkeypatch: pytest.MonkeyPatch, max_frames: int, first: int
) -> None:
    monkeypatch.setattr(page_data_module, "MAX_FRAMES", max_frames)
    data = page_data(read_trace(SAMPLE), steps=(first, None))
    seq_of = {index: lane["seq"] for index, lane in enumerate(data.meta["lanes"])}
    replayed, after = Replayed(data), States(read_trace(SAMPLE).replay()).of
    assert data.meta["stepsPerFrame"] == (3 if max_frames == 75 else 1)
    assert bool(data.meta["thinned"]) == (max_frames == 75)
    names: dict[int, bytes] = {}
    for frame, step in enumerate(data.columns["step"]):
        replayed.frame(frame)
        refs, contents, tables = after[step]
        assert replayed.refs == refs, step
        assert replayed.content.keys() == contents.keys(), step
        for block, number in replayed.content.items():
            assert names.setdefault(number, contents[block]) == contents[block], step
        held = {seq_of[lane]: table for lane, table in replayed.tables.items() if table}
        assert held == {seq_id: table for seq_id, (table, _) in tables.items() if table}, step
        active = sum(count > 0 for count in refs)
        assert data.columns["active"][frame] == active
        assert data.columns["cached"][frame] == len(contents) - sum(refs[b] > 0 for b in contents)


def test_figures_of_a_run_are_consistent() -> None:
    recording = read_trace(SAMPLE)
    data = page_data(recording)
    columns, steps = data.columns, list(recording.replay().steps())
    assert sum(columns["prefill"]) + sum(columns["decode"]) == sum(p.num_tokens for p, _ in steps)
    assert sum(columns["sampled"]) == sum(len(t) for _, one in steps for t in one.token_ids)
    assert sum(columns["recomputed"]) > 0
    preempted = sum(len(plan.preempted) for plan, _ in steps)
    assert sum(mark[1] == "preempted" for mark in data.meta["marks"]) == preempted > 0
    ends = {lane["seq"]: (lane["reason"], lane["ended"]) for lane in data.meta["lanes"]}
    assert all(reason and ended >= 0 for reason, ended in ends.values())
    for lane, (start, stop) in enumerate(itertools.pairwise(columns["spansOf"])):
        spans = [columns["spans"][i : i + 4] for i in range(start, stop, 4)]
        assert all(first <= last for first, last, *_ in spans), data.meta["lanes"][lane]
        assert all(one[1] < other[0] for one, other in itertools.pairwise(spans)), spans


def test_omitted_data_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data_module, "MAX_LANES", 5)
    monkeypatch.setattr(page_data_module, "MAX_TOKENS", 10)
    monkeypatch.setattr(page_data_module, "MAX_NOTES", 3)
    data = page_data(read_trace(SAMPLE))
    thinned = " ".join(data.meta["thinned"])
    assert (
        "the last 12 of" in thinned and "are too many" in thinned and "notes are omitted" in thinned
    )
    assert len(data.meta["lanes"]) == 5 and not data.columns["tokens"]
    assert len(data.columns["spansOf"]) == 6


def test_missing_steps_raise() -> None:
    with pytest.raises(TraceError, match="it has steps 0 to 223"):
        page_data(read_trace(SAMPLE), steps=(1000, None))


# --- the file -------------------------------------------------------------------------------------


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, array[int]]]:
    """Returns the data in a page: its JSON and its columns."""
    (data,) = re.findall(r'id="data">([^<]*)</script>', text)
    raw = gzip.decompress(base64.b64decode(data))
    (length,) = struct.unpack("<I", raw[:4])
    meta, at, columns = json.loads(raw[4 : 4 + length]), 4 + length, {}
    for name, count in meta["columns"].items():
        columns[name] = array("i", raw[at : at + 4 * count])
        at += 4 * count
    assert at == len(raw)
    return meta, columns


def test_a_page_contains_its_data_and_little_else() -> None:
    data = page_data(read_trace(SAMPLE), text_of=lambda token_id: f"<{token_id}>", title="a & b")
    text = page(data)
    overhead = len(text.encode()) - len(base64.b64encode(packed(data)))
    assert 60_000 < overhead < MAX_PAGE_BYTES
    meta, columns = unpacked(text)
    assert columns == data.columns
    assert meta["words"]["974"] == "<974>" and "<title>a &amp; b" in text


def test_text_of_a_trace_is_escaped(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    lines = gzip.decompress(SAMPLE.read_bytes()).replace(b'"id":"0"', f'"id":"{name}"'.encode())
    path = tmp_path / "x.trace"
    path.write_bytes(lines)
    text = page(page_data(read_trace(path), text_of=lambda _: name, title=name))
    assert name not in text and text.count("<script") == 3
    assert unpacked(text)[0]["lanes"][0]["id"] == name
    assert "innerHTML" not in (SOURCES / "viewer.js").read_text(encoding="utf-8")


def test_the_content_security_policy_allows_only_own_scripts() -> None:
    text = page(page_data(read_trace(SAMPLE)))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for kind in ("script", "style"):
        for source in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", text) == []


def test_uplot_is_as_its_authors_published_it() -> None:
    for name, digest in UPLOT.items():
        assert hashlib.sha256((SOURCES / "uplot" / name).read_bytes()).hexdigest() == digest, name
    licence = " ".join((SOURCES / "uplot" / "LICENSE").read_text(encoding="utf-8").split())
    assert "The MIT License" in licence
    assert licence.replace('"', "&quot;") in page(page_data(read_trace(SAMPLE)))


# --- colours --------------------------------------------------------------------------------------

SIGHT = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip
"""Linear RGB for each type of colour vision: Machado, Oliveira and Fernandes 2009, severity 1.0."""
MIN_DISTANCE = 9
"""CIE 1976: about four times the just noticeable difference side by side."""


def linear(colour: str) -> Any:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_of_lanes_differ_for_all_types_of_colour_vision(theme: int, sight: str) -> None:
    style = (SOURCES / "viewer.css").read_text(encoding="utf-8")
    palette = re.findall(r"--c\d: (#\w{6})", style)[8 * theme : 8 * theme + 8]
    assert len(palette) == 8
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in palette]
    nearest = min(
        (float(np.linalg.norm(seen[i] - seen[j])), palette[i], palette[j])
        for i, j in itertools.combinations(range(8), 2)
    )
    assert nearest[0] >= MIN_DISTANCE, nearest


# --- the command ----------------------------------------------------------------------------------


def test_viz_writes_a_page_with_token_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanoengine.assets import demo_model_path

    out = tmp_path / "page.html"
    options = ["--tokenizer", str(demo_model_path()), "--steps", "10:20"]
    assert main(["viz", str(SAMPLE), "-o", str(out), *options]) == 0
    meta, columns = unpacked(out.read_text(encoding="utf-8"))
    assert list(columns["step"]) == list(range(10, 20))
    lane = meta["lanes"][0]
    assert lane["id"] == "0"
    first = columns["tokens"][: lane["prompt"]]
    assert "".join(meta["words"][str(i)] for i in first).startswith("Once upon a time")
    assert str(out) in capsys.readouterr().out


TORN = gzip.compress(gzip.decompress(SAMPLE.read_bytes()).partition(b"\n")[0] + b"\n{")


@pytest.mark.parametrize(
    ("content", "options", "why"),
    [
        (b"hello\n", [], "not a nanoengine trace"),
        (TORN, [], "it has no steps"),
        (SAMPLE.read_bytes(), ["--steps", "5"], "--steps must be A:B"),
        (SAMPLE.read_bytes(), ["--tokenizer", "/nowhere"], "directory, got '/nowhere'"),
        (None, [], "No such file"),
    ],
    ids=["text", "header alone", "steps", "tokenizer", "missing"],
)
def test_invalid_input_is_a_one_line_error_with_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    options: list[str],
    why: str,
) -> None:
    path = tmp_path / "run.trace.gz"
    if content is not None:
        path.write_bytes(content)
    assert main(["viz", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert re.search(why, captured.err) and captured.err.count("\n") == 1, captured.err
    assert captured.out == "" and not (tmp_path / "run.html").exists()


def test_an_incomplete_trace_is_shown_up_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.trace"
    path.write_bytes(gzip.decompress(SAMPLE.read_bytes())[:9000])
    assert main(["viz", str(path)]) == 0
    assert "file is incomplete" in capsys.readouterr().out
    meta, _ = unpacked((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert "file is incomplete" in " ".join(meta["thinned"])
