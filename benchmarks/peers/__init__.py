"""Lockstep beside other PyTorch programs on CPUs: `make bench-peers`.

Each contender runs in its own process (contender.py), so that settings stay separate. Contenders take turns
of a few steps, so that other work on the machine affects all of them. `__main__.py` compares them.
"""
