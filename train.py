"""Train a network on one or more devices, with one trainer and one loader process for each.

    python train.py                                    config.yaml, on all usable GPUs, else CPUs
    python train.py --spec spec_2gpu.yaml              the devices and batch size of a spec
    python train.py --config config_alexnet.yaml learning_rate=0.02 run_name=try2
    python train.py resume_train=True                  resume the newest run, with its own settings
    python train.py resume_train=True run_name=try2 load_epoch=20

Later settings override earlier ones: config, then spec, then key=value. config.yaml explains the keys.
`python` is that of the environment that `make setup` creates: .venv/bin/python.

This file is the launcher: it checks the settings, starts the processes, watches them, and exits with a code.
Exit codes: 0 the run is complete; 2 a setting or file can't be used; 130 Ctrl-C (the step was finished and
saved; press again to leave at once), 143 SIGTERM or SIGHUP (a closed terminal), likewise; 1 anything else,
and the last line says which process failed, how, and what it was doing.
"""

from lockstep.signals import Interrupts
from lockstep.text import handle_closed_pipe

if __name__ == "__main__":
    handle_closed_pipe(ends_program=False)
    interrupts = Interrupts()
    interrupts.install("stopped as asked, before training began")  # now: the imports below take a second

from lockstep.launch.template import Stopped, Template

if __name__ == "__main__":
    template = Template(("train_funcs", "proc_load"))  # imports torch beside the checks below

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.backends import devices
from lockstep.comm.messages import Started
from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.errors import PeerProblem, UserError
from lockstep.launch import commandline
from lockstep.launch.attempts import Attempt, Context, Failures, orders_of, worlds_of
from lockstep.launch.checks import open_all
from lockstep.launch.children import ExitStatus
from lockstep.launch.console import Console, announce, show
from lockstep.launch.hosting import SingleHost, leave, with_hosts
from lockstep.launch.processes import Processes, connect_all
from lockstep.launch.recovery import Recovery
from lockstep.launch.status import begin_trace
from lockstep.launch.subprocesses import live_report, write_report
from lockstep.runs import versions
from lockstep.runs.folder import RunFolder

HERE = Path(__file__).resolve().parent


def main(interrupts: Interrupts, template: Template | None = None) -> int:
    """Run the program and return its exit code. Without a template, processes are spawned."""
    try:
        if not sys.platform.startswith("linux"):
            raise UserError("Lockstep runs on Linux only: it needs memfd and descriptor passing")
        arguments = commandline.parse_arguments(__doc__, HERE / "config.yaml", globals().get("COMMAND"))
        failures = Failures()

        def run_with(host: SingleHost) -> int:
            config, dataset, run = open_all(arguments, HERE / "models", host, interrupts, template)
            with live_report(config, run.folder):
                code = train(config, dataset, run, Context(host, interrupts, template, failures))
            if code == 0 and config.report and host.host == 0:
                write_report(run.folder, interrupts)
            return code

        return with_hosts(arguments.config, interrupts, run_with)
    except (UserError, PeerProblem) as error:
        show(f"lockstep: {error}", "stderr")
        return error.code


def train(config: Config, dataset: Dataset, run: RunFolder, context: Context) -> int:
    """Train to the end, resuming after lost processes as `on_failure` says. Return the exit code."""
    host, n_steps = context.host, orders_of(config, dataset).n_steps("train")
    console = Console(run.folder / host.log, config, n_steps, host.writes)
    attempt: Attempt | None = (first := Attempt(config, run))
    recovery = Recovery(console, dataset, first, context)
    while attempt:
        exit_status, last_step = train_once(attempt, dataset, context, console, recovery)
        exit_status, attempt = recovery.next(attempt, exit_status, last_step)
    exit_status = console.log_ending(host.conclude(exit_status))
    if not console.close(console.last_line(exit_status), "stderr" if exit_status.code else "stdout"):
        os._exit(exit_status.code)  # the terminal is blocked; Python's own flush at exit would wait for it
    return exit_status.code


def train_once(
    attempt: Attempt, dataset: Dataset, context: Context, console: Console, recovery: Recovery
) -> tuple[ExitStatus, tuple[int, int]]:
    """Run all processes until they have exited. Return how they ended, and the last step: epoch, number."""
    config, folder, host = attempt.config, attempt.run.folder, context.host

    def on_message(message: object) -> None:
        if isinstance(message, Started) and host.writes:  # not earlier: it replaces a good run's settings
            recovery.keep_settings(attempt)
        if not recovery.take(attempt, message):
            console.take(message)

    try:
        if attempt.number == 0:
            announce(console, dataset, attempt.run, config, orders_of(config, dataset))
        are_kept = attempt.number > 0 or (config.resume_train and (folder / "config.yaml").exists())
        if host.writes and not are_kept:  # now: a run that is killed before its first step can be resumed
            recovery.keep_settings(attempt)
        begin_trace(config.trace and host.writes, folder)
        with Processes(config.timeout, context.interrupts, template=context.template) as processes:
            host.begin_attempt(processes, attempt.number)
            start_processes(processes, attempt, context)
            machine = {"cores": devices.count_cores(), **devices.describe(config.devices)}
            software = {"versions": versions.of_packages(), "machine": machine}
            console.log("started", processes.pids() | software)
            if attempt.number == 0:
                console.say("starting: " + ", ".join(processes.pids()))
            processes.is_to_pause = lambda: recovery.is_to_pause(attempt)
            processes.may_restart = recovery.may_restart_loader
            processes.is_overdue = lambda: recovery.is_overdue(config, context.interrupts)
            return host.watch(processes, on_message), processes.last_step()
    except (UserError, PeerProblem) as error:  # the console prints it, after the lines that still wait
        return ExitStatus(error.code, str(error)), (0, 0)
    except Stopped:
        return ExitStatus.stopped_by(context.interrupts), (0, 0)


def start_processes(processes: Processes, attempt: Attempt, context: Context) -> None:
    """Start a trainer and, with para_load, a loader for each device, connected by pipes."""
    devices.number_gpus_by_place()
    config, worlds = attempt.config, worlds_of(attempt.config)
    plan = attempt.plan(context.host.host_connection, context.host.writes, context.failures.rate)
    peers = connect_all(len(worlds))
    for rank, world in enumerate(worlds):
        loaders: list[Connection] = []
        if config.para_load:  # a pipe for the loader, and one for each of its restarts
            pipes = [multiprocessing.Pipe() for _ in range(1 + devices.loader_restarts_of(config))]
            loaders = [trainer_end for trainer_end, _ in pipes]
            own, *spares = [(loader_end, world, config) for _, loader_end in pipes]
            processes.start(f"loader {rank}", "proc_load:run_loader", own, spares=spares)
        arguments = (plan, world, loaders, peers[rank])
        processes.start(f"trainer {rank}", "train_funcs:run_trainer", arguments, reporting=rank == 0)


if __name__ == "__main__":
    leave(main(interrupts, template), template)
