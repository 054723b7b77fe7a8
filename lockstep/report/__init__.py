"""The report of one or several runs: one HTML page that loads nothing, and its charts as PNG files.

runlog.py reads a run's folder, diagnosis.py finds what limits the run, ranks.py who waits for whom.
charts.py and filters.py draw, examples.py tests the network on validation images, and sections.py and page.py
write HTML. No other package imports matplotlib.
"""
