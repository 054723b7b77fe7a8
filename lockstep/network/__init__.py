"""A network as a trainer has it: built (build.py), its tensors in one block (arena.py), its optimizer
(optimizer.py, updater.py), and what is done with a batch (program.py is the contract, replica.py does it).
"""
