"""Tests for a real GPU. Without one they are imported, collected and skipped.

If the environment sets GPU_ROWS, one line of JSON per test is appended to that file as soon as the
test ends, with the traceback of a failure. An interrupted run keeps its results.
"""

import json
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
TRACEBACK_LINES = 25


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: `make test-gpu` on a machine that has one")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    # Why last: the controller has the report by then. It starts another worker for the other tests.
    if IS_WORKER and report.failed and is_context_dead():
        os._exit(1)
    if not IS_WORKER and "GPU_ROWS" in os.environ and (report.when == "call" or not report.passed):
        with open(os.environ["GPU_ROWS"], "a") as file:
            print(json.dumps(row_of(report)), file=file)


def pytest_collectreport(report):
    """Records a module that cannot be imported."""
    if report.failed and not IS_WORKER:
        pytest_runtest_logreport(report)


def row_of(report):
    """A test's name with its duration in seconds, its reason to skip, or its failure."""
    text = report.longreprtext.splitlines()
    if report.passed:
        return {"case": report.nodeid, "seconds": round(report.duration, 2)}
    if report.skipped:
        return {"case": report.nodeid, "skipped": str(report.longrepr[-1])}
    errors = [line for line in text if line.startswith("E ")] or text[-1:]
    first = errors[0].removeprefix("E").strip() if errors else "no reason given"
    return {"case": report.nodeid, "failed": first, "traceback": text[-TRACEBACK_LINES:]}


def is_context_dead():
    """Whether the CUDA context is broken: after an illegal access each call fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
