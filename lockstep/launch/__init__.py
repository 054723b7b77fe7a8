"""Processes: starting, watching and ending them (processes.py, children.py), their own side of it (child.py),
what each is doing (status.py), what the launcher shows and keeps (console.py, scalars.py, reporting.py), and
what trainer 0 tells it (progress.py). saving.py writes checkpoints behind the training. commandline.py reads
what was given, models.py looks whether the network is there, computing.py shares the cores among trainers,
ranks.py runs a function in several processes.
"""
