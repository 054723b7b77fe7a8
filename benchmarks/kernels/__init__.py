"""Benchmarks of single kernels on the CPU; gpu/ measures those for GPUs."""
