"""Benchmark nanoengine: `python bench.py`, `python bench.py --smoke`, `python bench.py --help`."""

import sys

from nanoengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
