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

from lockstep.backends import backend_of
from lockstep.comm.group import Group, World
from lockstep.comm.messages import Notice, Order, Saved, Started, Validated
from lockstep.comm.pipes import Pipe
from lockstep.data.dataset import open_dataset, subtracting
from lockstep.data.order import minibatches, share
from lockstep.errors import UserError
from lockstep.exchange.transport import Transport
from lockstep.launch.computing import computing
from lockstep.launch.progress import Teller, check_finite
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import open_feed
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.network.replica import Replica
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained.start import start_with
from lockstep.runs import checkpoint, versions
from lockstep.runs.folder import State, read_state
from lockstep.runs.plan import Plan
from lockstep.sync import Meeting, Rule
from lockstep.sync.agreement import check_replicas
from lockstep.sync.weights import Weights


def run_trainer(
    control: Pipe,
    board: StatusBoard,
    plan: Plan,
    world: World,
    loader: Connection | None,
    peers: dict[int, Connection],
) -> bool:
    """The process of a trainer, `world.rank`. Returns whether it stopped early because the launcher asked."""
    config = plan.config
    deadline = config.wait_deadline
    pipes = {other: Pipe(end, f"trainer {other}", deadline) for other, end in peers.items()}
    pipe = Pipe(loader, f"loader {world.rank}", deadline) if loader else None
    board.say("opening the dataset and building the network")
    with computing(config, world, board):
        trainer = Trainer(plan, Group(world, pipes), pipe, control, board)
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
        group: Group,
        loader: Pipe | None,
        control: Pipe,
        board: StatusBoard,
        orders: Iterator[Order] | None = None,
    ) -> None:
        self.plan, self.config, self.group, self.world = plan, plan.config, group, group.world
        self.control, self.board = control, board
        self.dataset = open_dataset(self.config)
        self.backend = backend_of(self.config.devices[self.world.local_rank])
        self.backend.start_computing(self.config)
        self.program: Program = Replica(self.config, self.dataset, self.backend.memory)
        self.dataset = subtracting(self.dataset, self.program.mean)
        self.recorder = Recorder(self.program.device, self.backend.stopwatch())
        self.teller = Teller(control, self.world, self.config, self.recorder)
        self.val_record: list[dict[str, float]] = []
        self.epoch, self.position = 1, 0
        if plan.start:
            self._go_on_from(plan.start)
        elif self.config.pretrained:
            self._start_with_pretrained()
        self.transport = self._open_transport()
        self.rule: Rule = Weights(self.transport)
        orders = orders or self.orders()
        self.feed = open_feed(
            self.backend, self.config, self.dataset, self.program, orders, board.say, loader
        )

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains and validates epoch by epoch. Returns True when the launcher's Stop ended it early."""
        check_replicas(self.group, self.program.arena, "the start")
        self.teller.tell(Started())
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
        self.transport.close()
        self.feed.close()
        self.program.arena.block.close()

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
        self.program.begin_epoch(self.epoch, len(self.dataset.train), rate)
        self.teller.begin()

    def train_step(self, n_steps: int) -> bool:
        """One step: load, forward and backward, update and exchange. Returns whether all are to stop."""
        order = self._forward_backward()
        printing = self.teller.is_due(order, n_steps, len(self.dataset.train))
        payload = self._asked_to_stop(), self.recorder.sums() if printing else None
        meeting = Meeting(self.group, str(order), payload, self.board.say)
        self.rule.update(self.program.optimizer, meeting)
        self.recorder.stopwatch.leave()
        self.recorder.n_steps += 1
        self.position = order.stop
        self.teller.tick(order, n_steps)
        stops, sums = zip(*(meeting.all_payloads or [payload]), strict=True)
        if printing:
            self.teller.report(order, n_steps, self.program.optimizer.learning_rate, list(sums))
        return any(stops)

    def _forward_backward(self) -> Order:
        """Of all minibatches of a step: `accumulate`, or what is left of the epoch. Returns the last."""
        order = self._next_order()
        stop = min(order.start + self._minibatch_size() * self.config.accumulate, len(self.dataset.train))
        mean_share = (stop - order.start) / self.world.size
        while True:
            self.recorder.stopwatch.enter("compute")
            self.board.say(f"{order}: forward, backward, update")
            self.program.forward_backward(self.feed.batch(), mean_share, self.world.rank, self.recorder)
            self.feed.release()
            if order.stop >= stop:
                return order
            order = self._next_order()

    def _next_order(self) -> Order:
        self.recorder.stopwatch.enter("load-wait")
        self.board.say(f"epoch {self.epoch}: waiting for a minibatch")
        return self.feed.next()

    def validate(self) -> bool:
        """Loss, top-1 and top-5 over the validation images, each counted once.

        Returns whether all are to stop. Validation that was cut short counts for nothing; a resumed run
        begins it again.
        """
        begin = time.perf_counter()
        self.program.begin_validation()
        sums = torch.zeros(3, dtype=torch.float64, device=self.program.device)
        n_images = len(self.dataset.val)
        n_steps = -(-n_images // self._minibatch_size())
        for _ in range(n_steps):
            order = self.feed.next()
            self.board.say(f"{order}: validating")
            sums += self.program.count_errors(self.feed.batch())
            self.feed.release()
            if any(self.group.all_gather(f"{order}: validated", self._asked_to_stop())):
                return True
            self.teller.tick(order, n_steps)
        met = self.group.all_gather("the sums of validation", sums.tolist())
        loss, top1, top5 = (sum(column) / n_images for column in zip(*met, strict=True))
        check_finite(loss, f"validation of epoch {self.epoch}")
        self.val_record.append({"epoch": self.epoch, "loss": loss, "error_top1": top1, "error_top5": top5})
        self.teller.tell(Validated(self.epoch, loss, top1, top5, n_images, time.perf_counter() - begin))
        return False

    def save(self) -> None:
        """A checkpoint, written by trainer 0 after all have shown that their replicas are equal."""
        self.board.say(f"epoch {self.epoch}: saving a checkpoint")
        if not self.program.arena.flat.isfinite().all():
            check_finite(math.nan, f"the checkpoint of epoch {self.epoch}")
        check_replicas(self.group, self.program.arena, f"the checkpoint of epoch {self.epoch}")
        if self.world.rank == 0:
            state = State(
                self.epoch,
                self.position,
                len(self.dataset.train),
                self.program.optimizer.learning_rate,
                self.val_record,
                self.world.size,
                asdict(self.config),
                versions.of_packages(),
            )
            path = checkpoint.save(
                self.plan.folder, {**self.program.arena.state(), **self.rule.state()}, state
            )
            self.teller.tell(Saved(str(path)))

    # -- parts -----------------------------------------------------------------------------------------------

    def _go_on_from(self, tensors: Path) -> None:
        self.board.say(f"loading {tensors}")
        self.program.load(tensors)
        state = read_state(tensors.with_suffix(".json"))
        self.val_record = list(state.val_record)
        self.epoch, self.position = state.epoch, state.position
        if len(self.val_record) == self.epoch:  # validated, so that epoch is complete
            self.epoch, self.position = self.epoch + 1, 0

    def _start_with_pretrained(self) -> None:
        self.board.say(f"loading {self.config.pretrained}")
        found = start_with(self.config, self.program.model, self.program.arena)
        self.val_record = list(found.record)
        self.epoch = len(self.val_record) + 1
        if self.epoch > self.config.n_epochs:
            text = f"all {self.config.n_epochs} epochs are done; raise n_epochs to go on"
            raise UserError(f"{found.source}: {text}")
        begin = f", going on after epoch {self.epoch - 1}" if self.val_record else ""
        self.teller.tell(Notice("\n  ".join([f"starting with {found.source}{begin}", *found.notes])))

    def _tell_what_to_know(self) -> None:
        size, n_trainers = self.program.crop_size, self.world.size
        if 2 * size < min(self.dataset.image_shape[:2]):
            text = f"the network takes {size} x {size} pixels, less than a quarter of a picture"
            self.teller.tell(Notice(f"{text}: make the dataset with --size {size * 9 // 8}"))
        parts = self.rule.inexact_parts(self.config, self.program.model)
        if parts and n_trainers > 1:
            text = f"{n_trainers} trainers are not exactly one with {n_trainers} times the batch"
            self.teller.tell(Notice(f"{text}: {'; '.join(parts)}"))

    def _open_transport(self) -> Transport:
        self.board.say("opening the arenas of the others")
        arena = self.program.arena
        transport, reason = self.backend.open_transport(
            self.config.exchange, arena.block, arena.flat, self.group
        )
        if reason:
            self.teller.tell(Notice(f"exchange: {transport.name}: {reason}"))
        transport.clock = self.recorder.stopwatch.enter
        return transport

    def _orders_of(self, stage: Any, epoch: int, n_samples: int, position: int) -> Iterator[Order]:
        size = self._minibatch_size()
        step_size = size * self.config.accumulate if stage == "train" else size
        for start, stop in minibatches(n_samples, size, position):
            first, last = share(start, stop, self.world.rank, self.world.size)
            yield Order(stage, epoch, start // step_size + 1, start, stop, first, last)

    def _minibatch_size(self) -> int:
        return self.config.batch_size * self.world.size

    def _asked_to_stop(self) -> bool:
        return self.control.poll()  # the launcher sends nothing but Stop
