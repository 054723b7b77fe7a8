"""Validation on its own, for validate.py."""
