"""Datasets: files of pictures (hkl.py, c01b.py), what belongs together and is whole (manifest.py,
dataset.py), theano_alexnet's folders (old_folders.py), the order of samples (sampling.py), what is drawn at
random (randomness.py), and crops of pictures (augment.py).
"""
