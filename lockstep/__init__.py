"""What train.py, train_funcs.py and proc_load.py stand on. Nothing in here imports those scripts."""

__version__ = "0.1.0"
