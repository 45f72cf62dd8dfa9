"""Benchmark nanoengine: `python bench.py`, `python bench.py --smoke`, `python bench.py --help`."""

import tyro

from nanoengine.cli.bench import BenchArgs, main

if __name__ == "__main__":
    main(tyro.cli(BenchArgs, description=__doc__))
