"""The report of one or several runs: one HTML page that needs nothing else, and its charts as PNG files.

`runlog` reads what a run has written, `diagnosis` says what limits it, `charts` and `pictures` draw, `examples` asks
the network itself, and `page` puts all of it together. Nothing else in Lockstep imports matplotlib.
"""
