"""Benchmarks of lockstep.flow."""
