"""Validation without training, for validate.py."""
