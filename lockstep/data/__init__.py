"""Datasets: their files, their order and their augmentation.

hkl.py and c01b.py read files of images. dataset.py and manifest.py open and check a dataset folder, and
old_folders.py theano_alexnet's. split.py is what loaders need of any dataset; items.py and survey.py make it
of Python objects. description.py has what users of a trained network need. sampling.py orders the samples
of an epoch, and randomness.py makes random choices reproducible.

preparing.py makes the network's images of stored ones: boxes.py draws rectangles, policies.py and
operations.py change images by Pillow, user_augmentation.py by the user's function. mixing.py pairs images.
augment.py converts them to float, with crop and mirror if those are the only changes, and colours.py shifts
colors.
"""
