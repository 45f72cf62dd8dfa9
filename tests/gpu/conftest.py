"""What needs a real GPU. Without one everything here is imported, collected and skipped."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: `make test-gpu` on a machine that has one")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
