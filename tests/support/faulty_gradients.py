"""Trainers that compute wrong gradients, for the tests and the campaign of `recheck_every`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import make_config
from training_runs import make_trainer

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.errors import DeviceFault, PeerLost, UndecidedFault

KEYS: dict[str, Any] = {"model": "smallnet", "learning_rate": 0.02, "logical_ranks": 4, "n_epochs": 2}


def config_of(data: Path, n_trainers: int, **values: Any) -> Config:
    fixed = {"data_folder": str(data), "para_load": False, "global_batch_size": 8, "shuffle_block": 3}
    return settle(make_config(devices=["cpu"] * n_trainers, **{**fixed, **KEYS, **values}))[0]


def break_gradients(trainer: Any, seed: int, from_step: int) -> None:
    """Change a bit of one element of all gradients of a trainer, from a step on, also when it rechecks."""
    dice, program = np.random.default_rng(seed), trainer.program
    gradients = program._gradients
    names = list(gradients.trained)
    first, last = program.arena.span_of(names[dice.integers(len(names))])
    element, bit = int(dice.integers(first, last)), int(dice.integers(32))
    learn, compare = program._learn_batch, program.recheck.begin_step
    steps = [0]

    def begin_step(order: Order) -> Any:
        steps[0] += 1
        return compare(order)

    def learn_wrongly(*arguments: Any) -> None:
        learn(*arguments)
        if steps[0] >= from_step:
            gradients.complete()
            gradients.flat[element : element + 1].view(torch.int32).bitwise_xor_(
                torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            )

    program.recheck.begin_step, program._learn_batch = begin_step, learn_wrongly
    trainer.steps = steps


def train_faultily(
    rank: int,
    pipes: dict[int, Pipe],
    config: Config,
    place: Path,
    wrong: int | None,
    from_step: int,
    seed: int,
) -> tuple[str, str, int]:
    """Train with at most one faulty trainer.

    Args:
        wrong: The rank of the faulty trainer; None for no fault.
        from_step: The first step with wrong gradients, counted from 1.
        seed: Of the gradient's element and bit that are wrong.

    Returns:
        The error's class and text, empty without one, and in the faulty trainer the step that raised it.
    """
    trainer, _keep_open = make_trainer(rank, pipes, config, place, double=False)
    if rank == wrong:
        break_gradients(trainer, seed, from_step)
    try:
        trainer.run()
    except (DeviceFault, UndecidedFault, PeerLost) as error:
        return type(error).__name__, str(error), getattr(trainer, "steps", [0])[0]
    return "", "", 0
