"""What a run leaves: its folder and which checkpoint to go on from (folder.py), tensors (checkpoint.py),
and which checkpoints stay (keeping.py).

plan.py is what its processes are told when they start, versions.py what a result depends on besides.
"""
