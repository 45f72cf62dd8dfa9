"""Benchmarks for users of the installed package: `nanoengine bench` and `nanoengine simulate`.

| in reading order | content |
|---|---|
| `workload.py` | requests: prompt ids and exact output lengths |
| `throughput.py` | measures a workload with an `LLM`; the table and the JSON |
| `simulator.py` | runs the scheduler and the block manager on a workload, without a model |

Benchmarks of nanoengine itself, compared with the hardware and with other engines, are not part of
the package: they are in `benchmarks/suite/` of the repository, run by `python bench.py`.
"""
