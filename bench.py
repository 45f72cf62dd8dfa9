"""Benchmark nanoengine: `python bench.py`, `python bench.py --smoke`, `python bench.py --help`.

`python bench.py --gpu-report [--out FILE]` measures an NVIDIA GPU, kernel by kernel (docs/gpu.md).
What it runs is in `benchmarks/suite/`; an installed package has `nanoengine bench`.
"""

import sys

from benchmarks.suite.main import main

if __name__ == "__main__":
    sys.exit(main())
