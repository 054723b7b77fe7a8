"""The launcher and its processes.

commandline.py and checks.py prepare a run; hosting.py joins those of other hosts. processes.py
starts, watches and ends child processes, which template.py forks, and restarts killed loaders; children.py is
the launcher's view of one, child_main.py its own side, and status.py the line that says what it is doing.
console.py, scalars.py and subprocesses.py show a run. recovery.py resumes the run after any other lost
process, resize_handler.py with other devices; resize.py is the command that asks for them.
ranks.py runs a function in several processes, for tools and tests.
"""
