"""What `bench.py --gpu-report` measures, part by part; `cli/gpu_report.py` drives it."""
