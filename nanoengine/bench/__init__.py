"""What a user of the installed package measures: `nanoengine bench` and `nanoengine simulate`.

| to read, in this order | what |
|---|---|
| `workload.py` | requests: prompt ids and exact output lengths |
| `throughput.py` | a workload through an `LLM`, against the clock; the table and the JSON |
| `simulator.py` | the scheduler and the block manager over a workload, without a model |

What measures nanoengine itself, beside the hardware and beside other engines, is no part of the
package: it is in `benchmarks/suite/` of the repository, behind `python bench.py`.
"""
