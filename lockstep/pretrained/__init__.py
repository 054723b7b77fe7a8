"""Initial weights from other runs and programs, with a strict report of what fits.

initial_state.py starts a run from scratch, from its own checkpoint or from pretrained weights. weights.py
loads pretrained weights into a trainer. files.py reads state dicts, theano_folder.py reads and writes
theano_alexnet's folders, names.py translates the names of tensors, match.py compares them with the network,
and heads.py finds the last layer.
"""
