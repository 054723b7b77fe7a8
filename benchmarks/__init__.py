"""Measurements. `make bench` runs them all; each is also a module: python -m benchmarks.exchange

Everything is measured as a ratio within one run, ours and the peer in turn, and reported as medians with the
machine, the versions and the date. Nothing in here is a test: machines differ.
"""
