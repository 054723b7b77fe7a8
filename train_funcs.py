"""What one trainer does: build the network, take steps, meet the others and average, validate, save.

The same program runs for any number of trainers. A lone trainer has no peers to meet, and the mean of one
arena is that arena. docs/how-it-works.md follows one step through all processes.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint, versions
from lockstep.backends import backend_of
from lockstep.computing import computing
from lockstep.dataset import open_dataset, subtracting
from lockstep.errors import UserError
from lockstep.exchange import Exchange
from lockstep.feed import open_feed
from lockstep.messages import Notice, Order, Progress, Saved, Started, Tick, Validated
from lockstep.optim.build import inexact_parts
from lockstep.optim.schedules import learning_rate
from lockstep.order import minibatches, share
from lockstep.peers import Peers
from lockstep.pipes import Pipe
from lockstep.plan import Plan
from lockstep.pretrained.start import start_with
from lockstep.recorder import Recorder
from lockstep.replica import Replica
from lockstep.runfolder import State, read_state
from lockstep.status import StatusBoard

TICK_SECONDS = 0.25


def run_trainer(
    control: Pipe,
    board: StatusBoard,
    plan: Plan,
    rank: int,
    loader: Connection | None,
    peers: dict[int, Connection],
) -> bool:
    """The process of trainer `rank`. Returns whether it stopped early because the launcher asked."""
    config = plan.config
    deadline = config.wait_deadline
    pipes = {other: Pipe(end, f"trainer {other}", deadline) for other, end in peers.items()}
    pipe = Pipe(loader, f"loader {rank}", deadline) if loader else None
    board.say("opening the dataset and building the network")
    with computing(config, rank, board):
        trainer = Trainer(plan, Peers(rank, pipes), pipe, control, board)
        stopped = trainer.run()
        trainer.close()
    return stopped


class Trainer:
    """One trainer: its replica of the network, its feed of minibatches, its part in the exchange.

    orders: what is loaded, where it is not the run's; for benchmarks.
    """

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        loader: Pipe | None,
        control: Pipe,
        board: StatusBoard,
        orders: Iterator[Order] | None = None,
    ) -> None:
        self.plan, self.config, self.peers = plan, plan.config, peers
        self.control, self.board = control, board
        self.dataset = open_dataset(self.config)
        self.backend = backend_of(self.config.devices[peers.rank])
        self.backend.start_computing(self.config)
        self.replica = Replica(self.config, self.dataset, self.backend.memory)
        self.dataset = subtracting(self.dataset, self.replica.mean)
        self.val_record: list[dict[str, float]] = []
        self.epoch, self.position = 1, 0
        if plan.start:
            self._go_on_from(plan.start)
        elif self.config.pretrained:
            self._start_with_pretrained()
        self.exchange = self._open_exchange()
        orders = orders or self.orders()
        self.feed = open_feed(self.backend, self.config, self.dataset, self.replica, orders, board, loader)
        self.recorder = Recorder(self.replica.device, self.backend.stopwatch())
        self.printed_at = self.ticked_at = time.perf_counter()

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains and validates epoch by epoch. Returns True when the launcher's Stop ended it early."""
        self.check_replicas("the start")
        self._tell(Started())
        self._tell_what_to_know()
        stopped = False
        while self.epoch <= self.config.n_epochs and not stopped:
            stopped = self.train_epoch() or self.validate()
            if stopped or self.epoch % self.config.snapshot_freq == 0 or self.epoch == self.config.n_epochs:
                self.save()
            if not stopped:
                self.epoch, self.position = self.epoch + 1, 0
        return stopped

    def close(self) -> None:
        """Lets go of the memory of the others, then frees what they have let go of."""
        self.exchange.close()
        self.feed.close()
        self.replica.arena.block.close()

    def orders(self) -> Iterator[Order]:
        """Every order of the run, from where it stands: each epoch's training, then its validation."""
        position = self.position
        for epoch in range(self.epoch, self.config.n_epochs + 1):
            yield from self._orders_of("train", epoch, len(self.dataset.train), position)
            yield from self._orders_of("val", epoch, len(self.dataset.val), 0)
            position = 0

    def train_epoch(self) -> bool:
        """The rest of an epoch's steps. Returns whether the trainers agreed to stop."""
        self.begin_epoch()
        n_samples = len(self.dataset.train)
        n_steps = -(-n_samples // (self._minibatch_size() * self.config.accumulate))
        while self.position < n_samples:
            if self.train_step(n_steps):
                return True
        return False

    def begin_epoch(self) -> None:
        """Sets what is the epoch's: the learning rate, the samples' dropout keys, the clock."""
        rate = learning_rate(self.config, self.epoch, [entry["error_top1"] for entry in self.val_record])
        self.replica.begin_epoch(self.epoch, len(self.dataset.train), rate)
        self.recorder.reset()
        self.printed_at = time.perf_counter()

    def train_step(self, n_steps: int) -> bool:
        """One step: forward, backward, update, average with the others. Returns whether all are to stop."""
        phase = self.recorder.stopwatch.phase
        order = self._next_order()
        stop = min(order.start + self._minibatch_size() * self.config.accumulate, len(self.dataset.train))
        mean_share = (stop - order.start) / self.peers.n_trainers
        while order.stop < stop:
            with phase("compute"):
                self.board.say(f"{order}: forward, backward")
                self.replica.learn(self.feed.batch(), mean_share, self.peers.rank, self.recorder)
                self.feed.release()
            order = self._next_order()
        with phase("compute"):
            self.board.say(f"{order}: forward, backward, update")
            self.replica.update(self.feed.batch(), mean_share, self.peers.rank, self.recorder)
            self.feed.release()
            self.exchange.updated()
        ends_short_epoch = n_steps < self.config.print_freq and order.stop == len(self.dataset.train)
        printing = order.step % self.config.print_freq == 0 or ends_short_epoch
        with phase("meet"):
            self.board.say(f"{order}: meeting the others after the update")
            sums = self.recorder.sums() if printing else None
            met = self.peers.meet(f"{order}: updated", (self._asked_to_stop(), sums))
            self.exchange.await_updates()
        with phase("exchange"):
            self.board.say(f"{order}: averaging")
            self.exchange.average()
        with phase("meet"):
            self.board.say(f"{order}: meeting the others after averaging")
            self.peers.meet(f"{order}: averaged")
            self.exchange.averaged()
        self.recorder.n_steps += 1
        self.position = order.stop
        self._tick(order, n_steps)
        if printing:
            self._report(order, n_steps, [theirs for _, theirs in met])
        return any(stop for stop, _ in met)

    def validate(self) -> bool:
        """Loss, top-1 and top-5 over the validation images, each counted once.

        Returns whether all are to stop. Validation that was cut short counts for nothing; a resumed run
        begins it again.
        """
        begin = time.perf_counter()
        self.replica.begin_validation()
        sums = torch.zeros(3, dtype=torch.float64, device=self.replica.device)
        n_images = len(self.dataset.val)
        n_steps = -(-n_images // self._minibatch_size())
        for _ in range(n_steps):
            order = self.feed.next()
            self.board.say(f"{order}: validating")
            sums += self.replica.count_errors(self.feed.batch())
            self.feed.release()
            if any(self.peers.meet(f"{order}: validated", self._asked_to_stop())):
                return True
            self._tick(order, n_steps)
        met = self.peers.meet("the sums of validation", sums.tolist())
        loss, top1, top5 = (sum(column) / n_images for column in zip(*met, strict=True))
        self._check_finite(loss, f"validation of epoch {self.epoch}")
        self.val_record.append({"epoch": self.epoch, "loss": loss, "error_top1": top1, "error_top5": top5})
        self._tell(Validated(self.epoch, loss, top1, top5, n_images, time.perf_counter() - begin))
        return False

    def save(self) -> None:
        """A checkpoint, written by trainer 0 after all have shown that their replicas are equal."""
        self.board.say(f"epoch {self.epoch}: saving a checkpoint")
        if not self.replica.arena.flat.isfinite().all():
            self._check_finite(math.nan, f"the checkpoint of epoch {self.epoch}")
        self.check_replicas(f"the checkpoint of epoch {self.epoch}")
        if self.peers.rank == 0:
            state = State(
                self.epoch,
                self.position,
                len(self.dataset.train),
                self.replica.learning_rate,
                self.val_record,
                self.peers.n_trainers,
                asdict(self.config),
                versions.of_packages(self.config.devices),
            )
            path = checkpoint.save(self.plan.folder, self.replica.arena.state(), state)
            self._tell(Saved(str(path)))

    def check_replicas(self, when: str) -> None:
        """Raises RuntimeError naming the first tensor that is not bitwise equal in all trainers."""
        first, *others = self.peers.meet(f"comparing replicas at {when}", self.replica.arena.digests())
        for rank, digests in enumerate(others, 1):
            for name, digest in digests.items():
                if digest != first[name]:
                    raise RuntimeError(
                        f"replicas differ at {when}: {name} of trainer {rank} is not trainer 0's"
                    )

    # -- parts -----------------------------------------------------------------------------------------------

    def _go_on_from(self, tensors: Path) -> None:
        self.board.say(f"loading {tensors}")
        self.replica.load(tensors)
        state = read_state(tensors.with_suffix(".json"))
        self.val_record = list(state.val_record)
        self.epoch, self.position = state.epoch, state.position
        if len(self.val_record) == self.epoch:  # validated, so that epoch is complete
            self.epoch, self.position = self.epoch + 1, 0

    def _start_with_pretrained(self) -> None:
        self.board.say(f"loading {self.config.pretrained}")
        found = start_with(self.config, self.replica.model, self.replica.arena)
        self.val_record = list(found.record)
        self.epoch = len(self.val_record) + 1
        if self.epoch > self.config.n_epochs:
            text = f"all {self.config.n_epochs} epochs are done; raise n_epochs to go on"
            raise UserError(f"{found.source}: {text}")
        begin = f", going on after epoch {self.epoch - 1}" if self.val_record else ""
        self._tell(Notice("\n  ".join([f"starting with {found.source}{begin}", *found.notes])))

    def _tell_what_to_know(self) -> None:
        size, n_trainers = self.replica.crop_size, self.peers.n_trainers
        if 2 * size < min(self.dataset.image_shape[:2]):
            text = f"the network takes {size} x {size} pixels, less than a quarter of a picture"
            self._tell(Notice(f"{text}: make the dataset with --size {size * 9 // 8}"))
        parts = inexact_parts(self.config, self.replica.model)
        if parts and n_trainers > 1:
            text = f"{n_trainers} trainers are not exactly one with {n_trainers} times the batch"
            self._tell(Notice(f"{text}: {'; '.join(parts)}"))

    def _next_order(self) -> Order:
        with self.recorder.stopwatch.phase("load-wait"):
            self.board.say(f"epoch {self.epoch}: waiting for a minibatch")
            return self.feed.next()

    def _open_exchange(self) -> Exchange:
        self.board.say("opening the arenas of the others")
        arena = self.replica.arena
        exchange, reason = self.backend.open_exchange(
            self.config.exchange, arena.block, arena.flat, self.peers
        )
        if reason:
            self._tell(Notice(f"exchange: {exchange.name}: {reason}"))
        return exchange

    def _orders_of(self, stage: Any, epoch: int, n_samples: int, position: int) -> Iterator[Order]:
        size, peers = self._minibatch_size(), self.peers
        step_size = size * self.config.accumulate if stage == "train" else size
        for start, stop in minibatches(n_samples, size, position):
            first, last = share(start, stop, peers.rank, peers.n_trainers)
            yield Order(stage, epoch, start // step_size + 1, start, stop, first, last)

    def _minibatch_size(self) -> int:
        return self.config.batch_size * self.peers.n_trainers

    def _asked_to_stop(self) -> bool:
        return self.control.poll()  # the launcher sends nothing but Stop

    def _check_finite(self, cost: float, where: str) -> None:
        if not math.isfinite(cost):
            raise UserError(
                f"the cost is {cost} at {where}: lower learning_rate, and check that images and labels match"
            )

    def _tell(self, message: Any) -> None:
        if self.peers.rank == 0:
            self.control.send(message)

    def _tick(self, order: Order, n_steps: int) -> None:
        now = time.perf_counter()
        if now - self.ticked_at >= TICK_SECONDS:
            self.ticked_at = now
            self._tell(Tick(order.stage, order.epoch, order.step, n_steps))

    def _report(self, order: Order, n_steps: int, sums: list[list[float]]) -> None:
        loss, n_wrong, n_images = (sum(column) for column in zip(*sums, strict=True))
        cost = loss / n_images
        self._check_finite(cost, str(order))
        elapsed = time.perf_counter() - self.printed_at
        error = n_wrong / n_images if self.config.print_train_error else None
        self._tell(
            Progress(
                order.epoch,
                order.step,
                n_steps,
                self.replica.learning_rate,
                cost,
                error,
                n_images / elapsed,
                20 * elapsed / self.recorder.n_steps,
                self.recorder.stopwatch.seconds(),
            )
        )
        self.recorder.reset()
        self.printed_at = time.perf_counter()
