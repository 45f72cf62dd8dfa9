"""What `python bench.py` measures beside the package's own `nanoengine bench`.

| file | what |
|---|---|
| `main.py`, `options.py` | the command line, by argparse alone |
| `limits.py`, `cost.py`, `peak.py`, `cpu_peak.py` | what the hardware could do |
| `roofline.py` | the shortest time that requests can take, by arithmetic |
| `hf_baseline.py`, `ladder.py` | `--compare`: beside transformers, beside the small engine |
| `ablate.py`, `sweep.py` | `--ablate`, `--sweep` and `--rate` |
| `plot.py`, `figures.py` | `--plot`, and `python -m benchmarks.suite.plot REPORT...` |
| `gpu_visit.py`, `gpu/` | `--gpu-report`, and a first visit to a GPU |
| `gpu_visit.py` | all that is asked of a machine with a GPU, in three commands |
| `shapes.py` | `--shape`: models by size, with random weights |
"""
