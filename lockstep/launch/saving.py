"""Checkpoints behind the training: at a step's end trainer 0 copies what belongs into one, the step goes on,
and a thread writes the copy.

There is one copy, and one write at a time. What goes wrong in the thread is raised in the trainer, after the
step in which it was seen.
"""

import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch

from lockstep.comm.group import World
from lockstep.comm.messages import Saved
from lockstep.errors import UserError
from lockstep.launch.progress import Teller
from lockstep.memory import Memory
from lockstep.network.program import Program
from lockstep.runs import checkpoint
from lockstep.runs.folder import State
from lockstep.runs.keeping import remove_older
from lockstep.runs.plan import Plan


class Saver:
    """Of each host's trainer 0: the others' have no room for a copy, and nothing is ever due.

    memory: of the device.
    """

    def __init__(self, plan: Plan, world: World, program: Program, memory: Memory, teller: Teller) -> None:
        self._plan, self._config, self._program, self._teller = plan, plan.config, program, teller
        self._world, self._is_first = world, world.local_rank == 0 and plan.writes
        self._thread = ThreadPoolExecutor(1, "saving")
        self._writing: Future[Path] | None = None
        self._began = time.monotonic()  # the last save, or the run
        if self._is_first:
            _check_disk(plan.folder, program.arena.flat.nbytes)
            self._room = _like(program.arena.flat, memory)
            self._copies = program.arena.views_of_all(self._room)

    def is_due(self) -> bool:
        """Whether save_minutes have passed; not while one is being written, so that a slow disk is not
        waited for. To be asked at every step: raises UserError where the last one could not be written.
        """
        if self._writing and self._writing.done():
            self._settle(self._writing)
        minutes = self._config.save_minutes if self._is_first else None
        if minutes is None or self._writing:
            return False
        return time.monotonic() - self._began >= 60 * minutes

    def save(
        self,
        epoch: int,
        position: int,
        n_samples: int,
        val_record: list[dict[str, float]],
        of_rule: dict[str, torch.Tensor],
    ) -> None:
        """Copies, and has the copy written; waits for an earlier write before. The others do nothing.

        n_samples: of an epoch. of_rule: what the rule has, which nobody changes any more.
        Raises UserError as `finish` does.
        """
        self.finish()
        if not self._is_first:
            return
        self._began, self._name = time.monotonic(), f"the checkpoint of epoch {epoch} at image {position}"
        arena = self._program.arena
        self._room.copy_(arena.flat)
        tensors = {**of_rule, **arena.copies_outside(), **self._copies}
        place = epoch, position, n_samples, self._program.optimizer.learning_rate
        state = partial(State.now, *place, list(val_record), self._world.size, self._config)
        self._writing = self._thread.submit(self._write, tensors, state)

    def finish(self) -> None:
        """Waits for the write under way. Raises UserError where it fails or wait_deadline passes."""
        if not self._writing:
            return
        seconds = self._config.wait_deadline  # in slices, which a suspended run (Ctrl-Z) loses one of at most
        if not any(wait([self._writing], 1.0).done for _ in range(math.ceil(seconds))):
            raise UserError(
                f"{self._plan.folder}: {self._name} is not written after {seconds:g} s: "
                "the disk is slow or hangs; a longer wait_deadline has more patience"
            )
        self._settle(self._writing)

    def _settle(self, writing: "Future[Path]") -> None:
        self._writing = None
        self._teller.tell(Saved(str(writing.result())))

    def _write(self, tensors: dict[str, torch.Tensor], make_state: Callable[[], State]) -> Path:
        if not self._room.isfinite().all():
            raise UserError(f"there are weights that are not finite in {self._name}: lower learning_rate")
        path = checkpoint.save(self._plan.folder, tensors, make_state())
        if self._config.keep is not None:
            remove_older(path, self._config.keep)
        return path


def _check_disk(folder: Path, n_bytes: int) -> None:
    """Raises UserError where there is no room for one checkpoint more: hours later would be too late."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise UserError(
            f"{folder}: a checkpoint takes {n_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free on its "
            "disk: make room, or set weights_dir to a folder on another disk"
        )


def _like(flat: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Room for a copy in host memory, whose pages are there: the first copy is not to wait for them."""
    room = torch.from_numpy(memory.pinned(flat.nbytes, "a copy of the weights, for checkpoints"))
    return room.fill_(0).view(flat.dtype)
