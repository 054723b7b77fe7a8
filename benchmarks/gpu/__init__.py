"""Every GPU test and measurement in one command: benchmarks/gpu.sh, or python -m benchmarks.gpu [folder].

`__main__.py` runs the sections one after the other, each in its own process with a limit (harness.py);
section.py is that process. A section keeps every figure as soon as it has it (record.py), so that what was
measured before a crash is not lost. report.py makes the tables from the JSON file, and from nothing else.

With --rehearse all sections run with small sizes on the simulated driver of the tests. That shows that these
programs work; its figures mean nothing.
"""
