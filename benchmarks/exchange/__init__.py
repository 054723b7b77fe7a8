"""Benchmarks of the exchange between the trainers of one host."""
