"""A network as a trainer has it: built (build.py), its tensors in one block (arena.py), its optimizer
(optimizer.py, updater.py: clipping, moving averages), and what is done with a batch (program.py is the
contract, replica.py does it: the loss, errors), how (dropout.py, precision.py, working.py: weights in
bfloat16, convolution.py, step_graph.py), and what is recorded of it (recorder.py: time by phase, sums).
"""
