"""Benchmark nanoengine: `python bench.py`, `python bench.py --smoke`, `python bench.py --help`.

`python bench.py --gpu-report [--out FILE]` measures an NVIDIA GPU, kernel by kernel (docs/gpu.md).
"""

import sys

from nanoengine.cli.main import main

if __name__ == "__main__":
    args = sys.argv[1:]
    command = "gpu-report" if "--gpu-report" in args else "bench"
    sys.exit(main([command, *(arg for arg in args if arg != "--gpu-report")]))
