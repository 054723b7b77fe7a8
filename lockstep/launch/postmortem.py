"""What is known of a training whose loss is not a number: where, with which pictures, and a copy."""

import json
import math
from pathlib import Path

from safetensors.torch import save_file

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.data.dataset import Split
from lockstep.data.sampling import EpochSamples, Rows
from lockstep.errors import UserError
from lockstep.files import write_text, write_with
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.runs.plan import Plan

_MOST_NAMED = 3  # stretches of a file, in a message; the record has all


class Losses:
    """Looks at the losses since the last line of progress. train: the pictures that are trained on."""

    def __init__(self, plan: Plan, group: Group, train: Split, program: Program, recorder: Recorder) -> None:
        self._plan, self._group, self._train = plan, group, train
        self._program, self._recorder = program, recorder

    def examine(self, sums: list[list[float]]) -> None:
        """sums: of every trainer's recorder; all trainers call it at once.

        Raises UserError where a loss is not finite, with step, learning rate, files and rows of the first
        such minibatch, when trainer 0 has kept them and the tensors in the run's folder, in postmortem/.
        """
        if all(math.isfinite(loss) for loss, *_ in sums):
            return
        order = self._recorder.orders[min(int(n_finite) for *_, n_finite in sums)]
        rows = self._rows(order)
        kept = self._plan.folder / "postmortem" / f"epoch_{order.epoch:04d}_step_{order.step:04d}.json"
        if self._group.world.rank == 0:
            self._keep(kept, order, rows)
        self._group.barrier("the post-mortem copy")
        rate = self._program.optimizer.learning_rate
        named = [f"{Path(path).name} rows {first} to {last}" for path, first, last in rows[:_MOST_NAMED]]
        more = f" and {len(rows) - _MOST_NAMED} more stretches" if len(rows) > _MOST_NAMED else ""
        raise UserError(
            f"the loss is not finite at {order}, with learning rate {rate:g} and the pictures "
            f"{', '.join(named)}{more} ({kept} has them all, and the tensors as they are now): "
            "lower learning_rate, and check that images and labels match"
        )

    def _rows(self, order: Order) -> list[tuple[str, int, int]]:
        """A minibatch's pictures: file, first row, last row."""
        config = self._plan.config
        shuffling = config.shuffle, config.shuffle_block, config.seed, order.epoch
        found: list[Rows] = EpochSamples(self._train.file_rows, *shuffling).rows(order.start, order.stop)
        return [(self._train.files[r.file].path, r.first, r.first + r.count - 1) for r in found]

    def _keep(self, path: Path, order: Order, rows: list[tuple[str, int, int]]) -> None:
        arena = self._program.arena
        record = {
            "epoch": order.epoch,
            "step": order.step,
            "learning_rate": self._program.optimizer.learning_rate,
            "pictures": [{"file": file, "first_row": first, "last_row": last} for file, first, last in rows],
            "not_finite": [name for name, value in arena.tensors.items() if not value.isfinite().all()],
        }
        tensors = {name: tensor.contiguous() for name, tensor in arena.state().items()}
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: the post-mortem copy can't be written: {error.strerror}") from error
        write_with(path.with_suffix(".safetensors"), lambda temporary: save_file(tensors, temporary))
        write_text(path, json.dumps(record, indent=1))
