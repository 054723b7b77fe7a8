"""Shares of the logical ranks that follow measured times: `shares: auto`."""

from itertools import pairwise

from lockstep.comm.messages import Order
from lockstep.config.shares import Bounds, balance, bounds_of, most_of, slowest
from lockstep.loading.orders import Orders
from lockstep.network.recorder import Recorder
from lockstep.trainer.coordinator import Coordinator
from lockstep.trainer.progress import ProgressReporter

FIRST_STEPS = 20  # after which the shares are chosen for the first time
_GAIN = 0.1  # least part of the slowest trainer's time that a change must save: noise moves nothing


class Balancer:
    """The choice of shares from compute times, after the first 20 steps and at every epoch's end.

    All trainers gather the same times and so make the same choice. It changes no bit of the training.

    Args:
        orders: The run's; their bounds are changed.
        recorder: Its stopwatch has the compute times.
        coordinator: All trainers.
        reporter: Sends a line about each change.
    """

    def __init__(
        self,
        orders: Orders,
        recorder: Recorder,
        coordinator: Coordinator,
        reporter: ProgressReporter,
    ) -> None:
        config = self._config = orders.config
        self._orders, self._recorder = orders, recorder
        self._coordinator, self._reporter = coordinator, reporter
        self._is_on = config.shares == "auto" and coordinator.world.size > 1
        self._bounds: Bounds = bounds_of(config) if self._is_on else ()
        self._n_steps, self._changed = 0, False
        self._n_images, self._begin = 0, 0.0

    def after_step(self, order: Order) -> None:
        """Count a step, and choose new shares when they are due. All trainers call it after the same step."""
        if not self._is_on:
            return
        self._n_steps += 1
        if self._n_steps == 1 or order.bounds != self._bounds:  # the first step takes longer; old shares
            self._measure_anew()
            return
        self._n_images += order.last - order.first
        ends_epoch = order.stop == self._orders.n_images("train")
        if self._n_steps == FIRST_STEPS or ends_epoch:
            self._choose(order)

    def _measure_anew(self) -> None:
        self._n_images, self._begin = 0, self._recorder.stopwatch.total("compute")

    def _choose(self, order: Order) -> None:
        """Gather the times of one logical rank, and change the shares if that saves enough."""
        config, n_logical = self._config, self._config.logical_ranks or 0
        computed = self._recorder.stopwatch.total("compute") - self._begin
        n_done = self._n_images * n_logical / (config.global_batch_size or 1)
        seconds = self._coordinator.all_gather(f"{order}: compute times", computed / n_done if n_done else 0)
        self._measure_anew()
        if not all(seconds):  # a trainer has computed nothing since the last choice
            return
        bounds = balance(seconds, n_logical, most_of(config))
        if slowest(seconds, bounds) > (1 - _GAIN) * slowest(seconds, self._bounds):
            return
        first = self._orders.change_bounds(bounds, order)
        if first is not None:
            text = f"shares: {_shares(bounds)} from {first} on, until then {_shares(self._bounds)}"
            times = ", ".join(f"{1e3 * each:,.1f}" for each in seconds)
            self._reporter.warn(f"{text}: a logical rank takes {times} ms")
            self._bounds = bounds


def _shares(bounds: Bounds) -> list[int]:
    return [last - first for first, last in pairwise(bounds)]
