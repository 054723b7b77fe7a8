"""Benchmarks of lockstep.synk: python -m benchmarks.synk."""
