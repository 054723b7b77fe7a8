"""Timelines for Perfetto and Chrome.

chrome.py writes them, for a run's processes and for `lockstep.flow`.

With `trace: true` every process appends each phase of its status board to its own file, with the time of
the machine's monotonic clock (lockstep/launch/status.py). All processes of the machine share that clock. A
trace thus has each phase of each step in trainers and loaders.
"""
