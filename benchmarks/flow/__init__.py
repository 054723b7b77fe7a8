"""Benchmarks of lockstep.flow: python -m benchmarks.flow."""
