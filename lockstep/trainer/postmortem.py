"""The post-mortem of a loss that is not finite: the step, its images, and a copy of the tensors."""

import json
import math
from pathlib import Path

from safetensors.torch import save_file

from lockstep.comm.messages import Order
from lockstep.data.dataset import Split
from lockstep.errors import UserError
from lockstep.files import write_text, write_with
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.runs.plan import RunPlan
from lockstep.trainer.coordinator import Coordinator

_MAX_NAMED = 3  # ranges of rows in a message; the record has all


class Losses:
    """A check that all losses since the last line of progress are finite.

    Args:
        train: The training split, to name a batch's images.
    """

    def __init__(
        self,
        plan: RunPlan,
        program: Program,
        recorder: Recorder,
        coordinator: Coordinator,
        train: Split,
    ) -> None:
        self._plan, self._coordinator, self._train = plan, coordinator, train
        self._program, self._recorder = program, recorder

    def examine_all(self) -> None:
        """Gather every trainer's sums and examine them. All trainers call it at the same time."""
        self.examine(self._coordinator.all_sums("examining the losses", self._recorder.sums()))

    def examine(self, sums: list[list[float]]) -> None:
        """Raise an error if a loss is not finite. All trainers call it at the same time.

        Args:
            sums: The sums of every trainer's recorder.

        Raises:
            UserError: A loss is not finite. The message has step, learning rate, files and rows of the first
                such batch. Trainer 0 of a host that writes to the run's folder has written them and the
                tensors to postmortem/ there.
        """
        if all(math.isfinite(loss) for loss, *_ in sums):
            return
        order = self._recorder.orders[min(int(n_finite) for *_, n_finite in sums)]
        rows = self._rows(order)
        record = self._plan.folder / "postmortem" / f"epoch_{order.epoch:04d}_step_{order.step:04d}.json"
        copied = ""
        if self._plan.writes:  # otherwise another host writes the same files, or a replay writes nothing
            copied = f" ({record} has them all, and the tensors as they are now)"
            if self._coordinator.world.local_rank == 0:
                self._write_copy(record, order, rows)
        self._coordinator.barrier("the post-mortem copy")
        rate = self._program.optimizer.learning_rate
        ranges = [f"{Path(path).name} rows {first} to {last}" for path, first, last in rows[:_MAX_NAMED]]
        more = f" and {len(rows) - _MAX_NAMED} more ranges" if len(rows) > _MAX_NAMED else ""
        raise UserError(
            f"the loss is not finite at {order}, with learning rate {rate:g} and the images "
            f"{', '.join(ranges)}{more}{copied}: "
            "lower learning_rate, and check that images and labels match"
        )

    def _rows(self, order: Order) -> list[tuple[str, int, int]]:
        """Return a batch's images as (file, first row, last row)."""
        samples = self._train.order_of(self._plan.config, order.epoch, training=True)
        rows = samples.rows(order.start, order.stop)
        return [(self._train.name_of(r.file), r.first, r.first + r.count - 1) for r in rows]

    def _write_copy(self, path: Path, order: Order, rows: list[tuple[str, int, int]]) -> None:
        arena = self._program.arena
        record = {
            "epoch": order.epoch,
            "step": order.step,
            "learning_rate": self._program.optimizer.learning_rate,
            "images": [{"file": file, "first_row": first, "last_row": last} for file, first, last in rows],
            "not_finite": [name for name, value in arena.tensors.items() if not value.isfinite().all()],
        }
        tensors = {name: tensor.contiguous() for name, tensor in arena.state().items()}
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: the post-mortem copy can't be written: {error.strerror}") from error
        write_with(path.with_suffix(".safetensors"), lambda temporary: save_file(tensors, temporary))
        write_text(path, json.dumps(record, indent=1))
