"""Lockstep beside what people write without it, on CPUs: `make bench-peers`.

Each contender is a process of its own (contender.py), so that no setting of one reaches another; they take
turns, a few steps each, so that all meet the same neighbours on the machine. `__main__.py` compares.
"""
