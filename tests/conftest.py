"""Where tests run: on the GPU if there is one; else Triton kernels run in its interpreter."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Why here: Triton reads it when kernels, and its own library, are imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Why: tiny models gain nothing from threads, and test processes run side by side.
torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays for good: no collection walks it, which took a tenth of all time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Lets libraries see everything freed at the end; some warn of leaks otherwise."""
    gc.unfreeze()
