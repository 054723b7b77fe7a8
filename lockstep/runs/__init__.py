"""A run's folder and checkpoints: folder.py has files and locks, checkpoint_files.py finds checkpoints
and verifies their checksums, checkpoint.py writes and reads their tensors. dataset_description.py keeps
what users of the trained network need of its dataset, and kept.py what its older checkpoints had.

plan.py has the settings that all processes of a run get, versions.py the versions that a result depends on.
metrics.py and stragglers.py evaluate answers and times that all trainers have gathered.
"""
