"""The launcher and its processes.

processes.py starts, watches and ends child processes, loader_restarts.py restarts killed loaders; child.py is
the children's side of it, status.py the line that says what each is doing. commandline.py, checks.py,
surveying.py and hosting.py prepare a run. console.py, bar.py, scalars.py and reporting.py show it, and
recovery.py resumes it after a lost process. In a trainer, trainer_setup.py opens the exchange, and
coordinator.py agrees with all trainers on stopping and saving. progress.py sends messages to the launcher,
straggler_watch.py finds the trainer that the others wait for, saving.py writes checkpoints in the background,
and postmortem.py examines losses. ranks.py runs a function in several processes, for tools and tests.
"""
