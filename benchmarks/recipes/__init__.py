"""Recipes beside the same ones in plain PyTorch: accuracy, time to it, and imbalanced classes."""
