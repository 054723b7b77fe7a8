"""A run's processes on one clock, as a file that Perfetto and Chrome show.

With `trace: true` every process appends what its status board says to a file of its own, with the time on
the machine's monotonic clock, which is one for all (lockstep/launch/status.py). So a trace has what the board
has: each phase of each step in trainers and loaders.
"""
