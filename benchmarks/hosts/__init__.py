"""Benchmarks of the exchange between hosts, and a model of its scaling: python -m benchmarks.hosts."""
