"""What needs a real GPU: left out, with a line that says so, where there is none."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/gpu left out: no CUDA GPU here; `make test-gpu` on one")
