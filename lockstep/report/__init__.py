"""The report of one or several runs: one HTML page that needs nothing else, and its charts as PNG files.

`runlog` reads what a run has written, `diagnosis` says what limits it, `charts` and `filters` draw,
`examples` tries the network, `sections` and `page` make HTML of it. Nothing else here imports matplotlib.
"""
