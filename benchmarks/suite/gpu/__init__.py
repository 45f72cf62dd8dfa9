"""What `bench.py --gpu-report` measures, part by part; `gpu_report.py` drives it."""
