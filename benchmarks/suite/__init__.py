"""What `python bench.py` measures in addition to the package's `nanoengine bench`.

| file | content |
|---|---|
| `main.py`, `options.py` | the command line, by argparse only |
| `limits.py`, `cost.py`, `peak.py`, `cpu_peak.py` | the limits of the hardware |
| `roofline.py` | the shortest time that requests can take, by arithmetic |
| `hf_baseline.py`, `ladder.py` | `--compare`: with transformers, with the small engine |
| `ablate.py`, `sweep.py` | `--ablate`, `--sweep` and `--rate` |
| `plot.py`, `figures.py` | `--plot`, and `python -m benchmarks.suite.plot REPORT...` |
| `gpu_visit.py`, `gpu/` | `--gpu-report`, and a first GPU run |
| `gpu_visit.py` | all measurements on a machine with a GPU, in three commands |
| `shapes.py` | `--shape`: models by size, with random weights |
"""
