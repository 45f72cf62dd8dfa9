"""Drafting on simulated machines: never a loss, and a large gain where extra tokens are cheap."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def ratios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("drafts_simulated").ratios
    for name in ("drafts_simulated", "speculative", "side_by_side"):
        sys.modules.pop(name, None)


def test_drafts_slow_no_batch_and_speed_up_one_stream_of_edits(ratios):
    args = argparse.Namespace(streams=[1, 8, 64], output_len=60, noise=0.0, bursts=0.0, runs=1)
    found = {(name, streams): kinds for name, streams, kinds in ratios(args)}
    assert len(found) == 12
    for where, kinds in found.items():
        assert min(kinds.values()) > 0.95, (where, kinds)
    assert all(found[name, 1]["edits"] > 2.5 for name, _ in found)
