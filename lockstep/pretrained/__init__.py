"""Weights that were trained elsewhere, by Lockstep or by others, and a strict report of what fits.

files.py reads state dicts, theano_folder.py reads and writes theano_alexnet's folders of .npy files, names.py
knows what others call their tensors, match.py compares with the network, heads.py finds the last layer,
weights.py puts it all into a trainer. beginning.py says where a run begins: there, at a checkpoint of its
own, or from scratch.
"""
