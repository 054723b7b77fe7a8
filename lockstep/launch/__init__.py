"""Processes: starting, watching and ending them (processes.py), their own side of it (child.py), what each is
doing (status.py), what the launcher shows and keeps (console.py, scalars.py), and what trainer 0 tells it
(progress.py).
"""
