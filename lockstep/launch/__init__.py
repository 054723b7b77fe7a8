"""The launcher and its processes.

commandline.py, checks.py and datasets.py prepare a run; hosting.py joins those of other hosts. processes.py
starts, watches and ends child processes, which template.py forks; children.py is the launcher's view of one,
child.py its own side, and status.py the line that says what it is doing. console.py, bar.py, scalars.py and
programs.py show a run. recovery.py resumes it after a lost process, and resizing.py with other devices.
ranks.py runs a function in several processes, for tools and tests.
"""
