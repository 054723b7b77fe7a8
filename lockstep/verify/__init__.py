"""Checks of a finished run against its receipts (lockstep/runs/receipts.py), for verify.py.

files.py compares the run's files and its data with the receipts. intervals.py chooses what to replay, and
says why a replay may differ. state_sender.py sends the digests of the states that verify.py computes again.
"""
