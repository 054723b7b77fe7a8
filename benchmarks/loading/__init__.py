"""Benchmarks of the way from a file to a batch: reading, decoding, augmentation."""
