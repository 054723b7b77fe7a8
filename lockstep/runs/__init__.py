"""What a run leaves: its folder and which checkpoint to go on from (folder.py), tensors (checkpoint.py)."""
