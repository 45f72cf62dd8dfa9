"""What `bench.py --gpu-report` measures, part by part; `gpu_visit.py` runs it."""
