"""Trains a network on one or more devices, one trainer and one loader process each.

    python train.py                                    config.yaml, on the devices that are there
    python train.py --spec spec_2gpu.yaml              the devices and batch size of a spec
    python train.py --config config_alexnet.yaml learning_rate=0.02 run_name=try2
    python train.py resume_train=True                  the newest run goes on where it stopped, as it was
    python train.py resume_train=True run_name=try2 load_epoch=20

Later settings override earlier ones: config, then spec, then key=value. config.yaml explains every key.
`python` is that of the environment that `make setup` makes: .venv/bin/python.

This file is the launcher: it checks what it was given, starts the processes, watches them, and ends with an
exit code: 0 the run is complete; 2 something given was wrong; 130 Ctrl-C (the step was finished and saved;
press again to leave at once), 143 SIGTERM, likewise; 1 anything else, and the last line says who failed, how,
and at what.
"""

from lockstep.interrupts import Interrupts

if __name__ == "__main__":
    interrupts = Interrupts()
    interrupts.install("stopped as asked, before training began")  # now: the imports below take a second

import itertools
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.comm.group import World
from lockstep.comm.messages import Started
from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.errors import PeerProblem, UserError
from lockstep.files import write_text
from lockstep.launch import commandline, recovery
from lockstep.launch.announcing import announce
from lockstep.launch.console import Console, show
from lockstep.launch.hosting import Alone, leave, together
from lockstep.launch.opening import open_all
from lockstep.launch.processes import Ending, Processes
from lockstep.launch.reporting import write_report
from lockstep.launch.status import begin_trace
from lockstep.loading.orders import Orders
from lockstep.runs import versions
from lockstep.runs.folder import Run
from lockstep.runs.plan import Plan

HERE = Path(__file__).resolve().parent


def main(interrupts: Interrupts) -> int:
    try:
        if not sys.platform.startswith("linux"):
            raise UserError("Lockstep runs on Linux only: it stands on memfd and descriptor passing")
        words = commandline.read_words(__doc__, HERE / "config.yaml")
        with together(words.config, interrupts) as others:
            config, dataset, run = open_all(words, HERE / "models", others)
            code = train(config, dataset, run, interrupts, others)
            if code == 0 and config.report and others.host == 0:
                write_report(run.folder, HERE, interrupts)
            return code
    except (UserError, PeerProblem) as error:
        show(f"lockstep: {error}", "stderr")
        return error.code


def train(config: Config, dataset: Dataset, run: Run, interrupts: Interrupts, others: Alone) -> int:
    """Trains to the end, over losses of processes where `on_loss` says so. Returns the exit code."""
    for n_restarts in itertools.count():
        ending, console = try_once(config, dataset, run, interrupts, others)
        going_on = None if interrupts.code else recovery.next_try(config, run, ending, n_restarts)
        if going_on is None:
            break
        console.close(f"lockstep: {ending.message}", "stderr")
        config, run = going_on
    if not console.close(console.last_words(ending), "stderr" if ending.code else "stdout"):
        os._exit(ending.code)  # the terminal takes no more; Python's own flush at its end would wait for it
    return ending.code


def try_once(
    config: Config, dataset: Dataset, run: Run, interrupts: Interrupts, others: Alone
) -> tuple[Ending, Console]:
    """Runs all processes to their end."""
    text = configuration.to_yaml(config)
    worlds = World.of_host(config.host or 0, config.hosts, len(config.devices))
    orders = Orders(config, worlds[0], len(dataset.train), len(dataset.val))
    console = Console(run.folder / others.log, config, orders.n_steps("train"))
    saved = run.folder / "config.yaml"

    def on_message(message: object) -> None:
        if isinstance(message, Started) and others.writes:  # before, it would replace a good run's file
            write_text(saved, text)
        console.take(message)

    try:
        console.say(f"# the resolved configuration, kept in {saved}\n{text}")
        announce(console, dataset, run, config, orders)
        if others.writes and not (config.resume_train and saved.exists()):  # killed soon, it can go on
            write_text(saved, text)
        begin_trace(config.trace and others.writes, run.folder)
        with Processes(config.wait_deadline, interrupts) as processes:
            start_processes(processes, config, run, worlds, others)
            machine = {"cores": devices.count_cores(), **devices.describe(config.devices)}
            made_with = {"versions": versions.of_packages(), "machine": machine}
            console.log("started", {**processes.pids(), **made_with})
            console.say("starting: " + ", ".join(processes.pids()))
            ending = others.watch(processes, on_message)
    except UserError as error:  # the console says it, after all that it still has to show
        ending = Ending(2, str(error))
    ending = others.conclude(ending)
    console.log_ending(ending)
    return ending, console


def start_processes(
    processes: Processes, config: Config, run: Run, worlds: list[World], others: Alone
) -> None:
    """Starts a trainer and, with para_load, a loader per device, with a pipe between all that talk."""
    devices.number_gpus_by_place()
    start = run.start.path if run.start else None
    plan = Plan(config, run.folder, start, others.joint, others.writes)
    peers: list[dict[int, Connection]] = [{} for _ in worlds]
    for rank in range(len(worlds)):
        for other in range(rank):
            peers[rank][other], peers[other][rank] = multiprocessing.Pipe()
    for rank, world in enumerate(worlds):
        ours: list[Connection] = []
        if config.para_load:
            pairs = [multiprocessing.Pipe() for _ in range(1 + config.loader_restarts)]
            ours = [pair[0] for pair in pairs]
            first, *spares = [(pair[1], world, config) for pair in pairs]
            processes.start(f"loader {rank}", "proc_load:run_loader", first, spares=spares)
            first[0].close()
        arguments = (plan, world, ours, peers[rank])
        processes.start(f"trainer {rank}", "train_funcs:run_trainer", arguments, speaker=rank == 0)
        # Only the children's copies are left, so that a child's death closes its pipes.
        for connection in (*ours, *peers[rank].values()):
            connection.close()


if __name__ == "__main__":
    leave(main(interrupts))
