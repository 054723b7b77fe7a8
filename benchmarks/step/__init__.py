"""Benchmarks of a training step and its parts, of checkpoints, and of the start of a run."""
