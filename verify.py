"""Check that a run happened as its receipts say: its files, its data and, if asked, its computation.

    python verify.py runs/try1                             the receipts, checkpoints, settings and data
    python verify.py runs/try1 --replay 20                 and 20 random intervals, computed again
    python verify.py runs/try1 --step 300 devices='[cpu]'  and the run from its beginning up to step 300
    python verify.py runs/try1 data_folder=/other/place --json

key=value overrides the run's configuration: devices, data_folder and others that change no bit. A replay may
use any number of devices. docs/verify.md says what is proven and what is not.

Exit code: 0 verified; 1 something is not as the receipts say, each in a line; 2 the run can't be verified: it
has no receipts, its data are missing, or an argument can't be used; 130 Ctrl-C, 143 SIGTERM or SIGHUP.
"""

from lockstep.signals import Interrupts
from lockstep.text import handle_closed_pipe

if __name__ == "__main__":
    handle_closed_pipe()
    interrupts = Interrupts()
    interrupts.install("stopped as asked")  # now: the imports below take a second

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.comm.group import Group, World
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths
from lockstep.launch.console import show
from lockstep.launch.processes import connect_all, run_trainers
from lockstep.launch.status import StatusBoard
from lockstep.launch.template import Template
from lockstep.objects import SOURCE
from lockstep.programs import make_parser
from lockstep.runs import receipts as chain
from lockstep.runs.folder import is_running
from lockstep.runs.plan import RunPlan
from lockstep.runs.receipts import Receipt
from lockstep.verify import files, intervals
from lockstep.verify.intervals import Replay


def main(interrupts: Interrupts) -> int:
    """Run the program and return its exit code."""
    try:
        arguments = parse_arguments()
        found = verify(arguments, interrupts)
    except UserError as error:
        show(f"lockstep: {error}", "stderr")
        return 2
    if interrupts.code:
        return interrupts.code
    if arguments.json:
        show(json.dumps(found, indent=1), "stdout")
    else:
        report(arguments.run, found)
    return 0 if found["verified"] else 1


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, globals().get("COMMAND"))
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--replay", type=int, metavar="N", help="compute N random intervals again")
    step = "compute the run again from its beginning up to step K, at least 1"
    parser.add_argument("--step", type=int, metavar="K", help=step)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="override the run's configuration"
    )
    arguments = parser.parse_intermixed_args()
    for option in ("replay", "step"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UserError(f"--{option} must be at least 1, not {value}")
    return arguments


@refusing_unusable_paths()
def verify(arguments: argparse.Namespace, interrupts: Interrupts) -> dict[str, Any]:
    """Return the result as a JSON object: problems, notes, and the replays.

    Raises:
        UserError: The run can't be verified.
    """
    folder = arguments.run
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run")
    is_training = is_running(folder)
    receipts, problems = chain.read(folder)
    found: dict[str, Any] = {"run": str(folder), "receipts": len(receipts), "problems": problems}
    found |= {"notes": [], "replays": []}
    if receipts:
        found["last_step"] = receipts[-1].step
        problems += files.check_config(folder, receipts)
        problems += files.check_states(receipts)
        config = read_config(folder, arguments.overrides, problems)
        problems += files.check_checkpoints(folder, receipts, config, found["notes"])
        if problems and is_training:  # it writes and removes files while they are read
            raise UserError(f"{folder}: trains now. Verify it when it has ended. Until then: {problems[0]}")
        if config:
            problems += check_data(config, receipts[-1], arguments.json, bool(problems))
        is_replayed = bool(arguments.replay or arguments.step)
        if config and not problems and (arguments.overrides or is_replayed):
            recorded = with_recorded_names(folder, config)
            intervals.check_settings(folder, receipts, chain.digest_of_settings(recorded))
        if config and not problems and is_replayed:
            replay_all(arguments, config, receipts, found, interrupts)
    found["verified"] = not problems
    return found


def read_config(folder: Path, overrides: list[str], problems: list[str]) -> Config | None:
    """Return the run's configuration with the overrides; None if it is damaged, which is a problem."""
    layer = configuration.read_command_line(overrides)
    try:
        config, _ = configuration.resolve([configuration.read_run(folder / "config.yaml"), layer])
    except UserError as error:
        if not problems:  # the file is that of the receipts, so an override is wrong
            raise
        problems.append(f"data: not checked, because the configuration can't be used: {error}")
        return None
    return config


def with_recorded_names(folder: Path, config: Config) -> Config:
    """Return the configuration with the run's names of a network and datasets that a Python program passed.

    The receipts have these names. To verify the run, the same objects are named by their module.
    """
    recorded = configuration.read_run(folder / "config.yaml").values
    names = {key: str(recorded.get(key)) for key in ("model", "data")}
    passed: dict[str, Any] = {key: name for key, name in names.items() if name.startswith(f"{SOURCE}:")}
    return dataclasses.replace(config, **passed)


def check_data(config: Config, receipt: Receipt, is_quiet: bool, has_problems: bool) -> list[str]:
    """Return the files of the dataset that differ, with a progress bar.

    Args:
        config: The run's, with the paths of the dataset.
        receipt: The last one.
        is_quiet: Whether to show no bar.
        has_problems: Whether something is wrong already, maybe the path of the dataset.

    Raises:
        UserError: There is no dataset, or its function can't be used, and no other problem.
    """
    with tqdm(unit=" files", disable=True if is_quiet else None, leave=False) as bar:

        def on_total(number: int) -> None:
            bar.total = number

        try:
            return list(files.check_data(config, receipt, on_total, lambda name: bar.update()))
        except UserError as error:
            if not has_problems and (config.data or not Path(config.data_folder).is_dir()):
                raise
            return [f"data: {error}"]


def replay_all(
    arguments: argparse.Namespace,
    config: Config,
    receipts: Sequence[Receipt],
    found: dict[str, Any],
    interrupts: Interrupts,
) -> None:
    """Replay what the arguments ask for, and add the results to `found`."""
    basis = chain.basis_of(config, with_recorded_names(arguments.run, config))
    replays: list[Replay] = []
    if arguments.replay:
        replays, n_all = intervals.choose(
            arguments.run, receipts, basis, arguments.replay, random.SystemRandom()
        )
        if n_all < arguments.replay:
            text = f"only {n_all} intervals can be replayed, not {arguments.replay}"
            found["notes"].append(f"{text}: a smaller check_every or snapshot_freq makes more")
    if arguments.step:
        replays.append(intervals.from_scratch(arguments.run, receipts, basis, arguments.step))
    config = on_devices(config, arguments.overrides, receipts[-1])
    n_steps = sum(replay.last - replay.first for replay in replays)
    with (
        closing(Template(["train_funcs"])) as template,
        tqdm(total=n_steps, unit=" steps", disable=True if arguments.json else None, leave=False) as bar,
    ):
        for each in replays:
            problem, reasons = replay(each, config, arguments.run, template, interrupts, bar)
            result = {"from": each.first, "to": each.last, "receipts": len(each.states)}
            found["replays"].append({**result, "equal": not problem})
            found["problems"] += [problem] if problem else []
            found["notes"] += [reason for reason in reasons if reason not in found["notes"]]


def on_devices(config: Config, overrides: list[str], receipt: Receipt) -> Config:
    """Return the configuration of a replay, on devices of this machine.

    Raises:
        UserError: The devices can't be used, or can't share the logical ranks.
    """
    values = configuration.read_command_line(overrides).values
    chosen = devices.normalise(config.devices) if "devices" in values else devices.choose()[0]
    devices.check(chosen)
    shares = config.shares if "shares" in values else "equal"
    n_threads = config.cpu_threads if "cpu_threads" in values else int(receipt.machine["threads"])
    if "devices" not in values:
        chosen = chosen[: config.logical_ranks]
    on_one_host = {"n_hosts": 1, "host_rank": None, "rendezvous": None, "host_address": None}
    config = dataclasses.replace(
        config,
        devices=chosen,
        shares=shares,
        cpu_threads=n_threads,
        patience=None,  # that of the last part of a run might end an earlier part
        para_load=False,
        trace=False,
        **on_one_host,  # type: ignore[arg-type]
    )
    return settle(config)[0]


def replay(
    each: Replay,
    config: Config,
    folder: Path,
    template: Template,
    interrupts: Interrupts,
    bar: "tqdm[Any]",
) -> tuple[str, list[str]]:
    """Compute the states of a replay again.

    Returns:
        The first difference, or '', and what differs between the run and this replay.

    Raises:
        UserError: A trainer failed.
    """
    from lockstep.verify.state_sender import ReplayBegun, ReplayedState  # imports torch

    begun: list[ReplayBegun] = []
    states: dict[int, str] = {}

    def on_message(message: object) -> None:
        if isinstance(message, ReplayBegun):
            begun.append(message)
        elif isinstance(message, ReplayedState):
            states[message.step] = message.state
            bar.update(message.step - max([each.first, *(step for step in states if step < message.step)]))

    plan = RunPlan(config, folder, each.start, writes=False)
    trainers = trainers_of(plan, tuple(each.states))
    exit_status = run_trainers(
        template, config.timeout, interrupts, "verify:run_replayer", trainers, on_message
    )
    if exit_status.code and not interrupts.code:
        raise UserError(f"the replay from step {each.first} failed: {exit_status.message}")
    if not interrupts.code and (missing := each.states.keys() - states.keys()):
        raise UserError(
            f"the replay from step {each.first} ended before step {min(missing)}: "
            "leave out n_epochs and other keys that end the run earlier"
        )
    differing = [step for step in states if states[step] != each.states[step].state]
    if not differing:
        return "", []
    first = min(differing)
    before = max((step for step in each.states if step < first), default=each.first)
    why = intervals.reasons(each.states[first], begun[0].versions, begun[0].machine)
    text = f"receipt {each.states[first].number}: steps {before} to {first} give another state when replayed"
    cause = "; ".join(why) or "data, configuration, versions and machine are those of the receipt"
    return f"{text} ({cause})", why


def trainers_of(plan: RunPlan, steps: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each trainer of a replay."""
    worlds = World.on_one_host(len(plan.config.devices))
    for world, peers in zip(worlds, connect_all(len(worlds)), strict=True):
        yield plan, world, peers, steps


def run_replayer(
    control: Pipe,
    board: StatusBoard,
    plan: RunPlan,
    world: World,
    peers: dict[int, Connection],
    steps: tuple[int, ...],
) -> bool:
    """Run the process of one trainer of a replay. Return False: it was not stopped early."""
    from lockstep.trainer.setup import computing
    from lockstep.verify.state_sender import StateSender
    from train_funcs import Trainer

    class Replayer(Trainer):
        """A trainer that stops after the last state that has a receipt."""

        def train_step(self, n_steps: int) -> bool:
            return super().train_step(n_steps) or sender.is_done

    with computing(plan.config, world, board):
        trainer = Replayer(plan, Group.connected(world, peers, plan.config.timeout), control, board)
        sender = trainer.saver = StateSender(
            plan,
            trainer.program,
            trainer.reporter,
            trainer.dataset,
            world=world,
            orders=trainer.orders,
            steps=steps,
        )
        trainer.run()
        trainer.close()
    return False


def report(folder: Path, found: dict[str, Any]) -> None:
    """Print the result for people."""
    for note in found["notes"]:
        show(f"note: {note}", "stdout")
    for problem in found["problems"]:
        show(f"NOT AS RECORDED: {problem}", "stdout")
    n_replayed = sum(each["to"] - each["from"] for each in found["replays"])
    replayed = f", {n_replayed} steps computed again" if found["replays"] else ""
    reach = f" up to step {found['last_step']}" if "last_step" in found else ""
    verdict = "verified" if found["verified"] else f"not verified: {len(found['problems'])} problem(s)"
    show(f"{folder}: {verdict}; {found['receipts']} receipts{reach}{replayed}", "stdout")


if __name__ == "__main__":
    sys.exit(main(interrupts))
