"""The validation of an epoch: all trainers measure their shares and add what they counted."""

import time
from typing import Any

import torch

from lockstep.comm.messages import Validated
from lockstep.comm.pipes import Pipe
from lockstep.config.tasks import is_multilabel, monitor_of
from lockstep.data.dataset import Dataset
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import Feed
from lockstep.loading.orders import Orders
from lockstep.network.program import Program
from lockstep.runs.metrics import HIGHER_IS_BETTER, AnswerCounts, has_ended
from lockstep.runs.multilabel import LabelMetrics
from lockstep.trainer.coordinator import Coordinator
from lockstep.trainer.progress import ProgressReporter, check_finite

FEW_CLASSES = 5  # with so few classes the top-5 error is always 0
_RECORDED = {"epoch", "error_top5", *HIGHER_IS_BETTER}


class Validator:
    """A measurement of the program on the validation images.

    Args:
        orders: The trainer's minibatches.
        dataset: Has the validation images and the number of classes.
        control: The pipe to the launcher, which may ask to stop.
        board: Shows what this trainer is doing.
    """

    def __init__(
        self,
        program: Program,
        coordinator: Coordinator,
        reporter: ProgressReporter,
        orders: Orders,
        dataset: Dataset,
        control: Pipe,
        board: StatusBoard,
    ) -> None:
        self._config = orders.config
        self._program, self._coordinator, self._reporter = program, coordinator, reporter
        self._control, self._say = control, board.say
        self._n_images, self._n_classes = len(dataset.val), dataset.n_classes
        self._n_steps = orders.n_steps("val")

    def measure(self, epoch: int, feed: Feed) -> dict[str, float] | None:
        """Measure an epoch and report it. All trainers call it at once and get the same entry.

        Returns:
            The entry for the record of validations, or None if the trainers stop.

        Raises:
            UserError: The loss is not finite.
        """
        begin = time.perf_counter()
        self._program.begin_validation()
        sums = torch.zeros(3, dtype=torch.float64, device=self._program.device)
        answers: list[torch.Tensor] = []
        with self._program.arena.restoring():  # trainers may call the network unequally often
            for _ in range(self._n_steps):
                order = feed.next()
                self._say(f"{order}: validating")
                sums += self._program.count_errors(feed.batch(), answers)
                feed.release()
                if self._coordinator.any(f"{order}: validated", self._control.poll()):
                    return None  # a resumed run validates again
                self._reporter.tick(order, self._n_steps)
        totals = self._coordinator.sums("validation", sums.tolist())
        errors = [total / self._n_images for total in totals]
        check_finite(errors[0], f"validation of epoch {epoch}")
        results = self._of_labels if is_multilabel(self._config) else self._of_classes
        message = Validated(
            epoch=epoch,
            loss=errors[0],
            n_images=self._n_images,
            seconds=time.perf_counter() - begin,
            **results(answers, errors),
        )
        self._reporter.send(message)
        entry = {
            "epoch": epoch,
            "loss": message.loss,
            "error_top1": message.error_top1,
            "error_top5": message.error_top5,
            **message.means,
        }
        return {key: value for key, value in entry.items() if key in _RECORDED and value is not None}

    def _of_classes(self, answers: list[torch.Tensor], errors: list[float]) -> dict[str, Any]:
        """Return the fields of `Validated` for one class per image. errors: Loss, top-1 and top-5 error."""
        counts = self._count_all(answers)
        by_class = counts.by_class()
        return {
            "error_top1": errors[1],
            "error_top5": errors[2] if self._n_classes > FEW_CLASSES else None,
            "means": by_class.means(),
            "classes": by_class.columns(),
            "confusion": counts.triples(),
        }

    def _of_labels(self, answers: list[torch.Tensor], errors: list[float]) -> dict[str, Any]:
        """Return the fields for any number of classes per image, from the scores of all trainers' images."""
        width = 2 * self._n_classes
        own = torch.cat([self._program.arena.flat.new_zeros((0, width)), *answers]).cpu()
        table = torch.from_numpy(self._coordinator.concatenated("the scores of the validation", own.numpy()))
        logits, labels = table[:, : self._n_classes], table[:, self._n_classes :]
        scores = torch.nn.functional.logsigmoid(logits.double())
        metrics = LabelMetrics.of(scores.numpy(), labels.numpy(), self._config.threshold)
        return {
            "error_top1": None,
            "error_top5": None,
            "means": metrics.means(),
            "classes": metrics.columns(),
        }

    def ends_run(self, record: list[dict[str, float]]) -> bool:
        """Return whether `patience` ends the run. All trainers have the same record, so they agree."""
        monitor, patience = monitor_of(self._config), self._config.patience
        ended = has_ended(record, monitor, patience)
        if ended and record[-1]["epoch"] < self._config.n_epochs:
            self._reporter.warn(f"no better {monitor} within patience ({patience}), so the run ends")
        return ended

    def _count_all(self, answers: list[torch.Tensor]) -> AnswerCounts:
        """Return the answers of all trainers."""
        labels, best = torch.cat(
            [torch.zeros((2, 0), dtype=torch.int64), *(each.cpu() for each in answers)], 1
        )
        own = AnswerCounts.of(self._n_classes, labels.numpy(), best.numpy())
        table = self._coordinator.concatenated("the answers of the validation", own.table())
        return AnswerCounts.joined(self._n_classes, table)
