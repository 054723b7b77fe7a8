"""Benchmarks by area. `make bench` runs those of the CPU; benchmarks/gpu.sh runs those of the GPU.

    kernels/   single kernels              exchange/   collectives of one host
    loading/   from a file to a batch      hosts/      collectives of several hosts, and their model
    step/      a step and its parts        flow/       lockstep.flow
    peers/     other libraries             synk/       lockstep.synk
    gpu/       everything on GPUs

drift.py, rules.py and simulate.py are programs over several areas. measure.py and lone.py are shared.

Each comparison takes turns within one run, Lockstep and its peer, and reports medians with the machine, the
versions and the date. None of these is a test, because machines differ.
"""
