"""What one trainer does: build the network, take steps, meet the others and average, validate, save.

The same program runs for any number of trainers. A lone trainer has no peers to meet, and the mean of one
arena is that arena. docs/how-it-works.md follows one step through all processes.
"""

import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from lockstep.backends import backend_of
from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order, Started, Validated
from lockstep.comm.pipes import Pipe
from lockstep.data.dataset import open_dataset
from lockstep.hosts.everyone import Everyone
from lockstep.launch.computing import computing
from lockstep.launch.exchanging import open_exchange
from lockstep.launch.postmortem import Losses
from lockstep.launch.progress import Teller, check_finite, notices_of
from lockstep.launch.saving import Saver
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import open_feed
from lockstep.loading.orders import Orders
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.network.replica import Replica
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained.beginning import begin
from lockstep.runs.plan import Plan
from lockstep.sync.agreement import ReplicaCheck


def run_trainer(
    control: Pipe,
    board: StatusBoard,
    plan: Plan,
    world: World,
    loaders: list[Connection],
    peers: dict[int, Connection],
) -> bool:
    """The process of a trainer, `world.rank`. Returns whether it stopped early because the launcher asked."""
    group = Group.connected(world, peers, plan.config.wait_deadline)
    pipes = [Pipe(each, f"loader {world.local_rank}", plan.config.wait_deadline) for each in loaders]
    board.say("opening the dataset and building the network")
    with computing(plan.config, world, board):
        trainer = Trainer(plan, group, pipes, control, board)
        stopped = trainer.run()
        trainer.close()
    return stopped


class Trainer:
    """Its network, minibatches and part in the exchange. control brings Stop. orders: if not the run's."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        loaders: Sequence[Pipe],
        control: Pipe,
        board: StatusBoard,
        orders: Iterator[Order] | None = None,
    ) -> None:
        self.plan, self.config, self.world = plan, plan.config, group.everywhere
        self.control, self.board = control, board
        self.dataset = open_dataset(self.config)
        self.backend = backend_of(self.config.devices[self.world.local_rank])
        self.backend.start_computing(self.config)
        self.program: Program = Replica(self.config, self.dataset, self.backend.memory)
        self.recorder = Recorder(self.program.device, self.backend.stopwatch())
        self.everyone = Everyone.joined(group, plan, self.program.arena.flat)
        self.teller = Teller(control, self.everyone, self.config, self.recorder)
        self.program.tell = self.teller.notice
        beginning = begin(plan, self.program, board.say)
        self.epoch, self.position, self.val_record = beginning.epoch, beginning.position, beginning.val_record
        self.board.say("opening the arenas of the others")
        clock, parts = self.recorder.stopwatch.enter, (self.config, self.backend, self.program, group)
        self.transport, self.rule, proven = open_exchange(*parts, clock, beginning.of_rule, self.everyone)
        self.teller.notice(beginning.notice, self.backend.speed_up(self.program, self.config), proven)
        self.losses = Losses(plan, group, self.dataset.train, self.program, self.recorder)
        self.saver = Saver(plan, self.world, self.program, self.backend.memory, self.teller)
        self.replicas = ReplicaCheck(group, self.program.arena, self.config.check_every, self.everyone.alike)
        self.orders = Orders(self.config, self.world, len(self.dataset.train), len(self.dataset.val))
        wanted = orders or self.orders.since(self.epoch, self.position)
        loading = self.backend, self.config, self.dataset, self.program
        self.feed = open_feed(*loading, wanted, board.say, loaders)

    def run(self) -> bool:
        """Trains and validates epoch by epoch. Returns True when the launcher's Stop ended it early."""
        self.teller.tell(Started({**self.program.ways}))
        self.teller.notice(*notices_of(self.config, self.dataset.image_shape, self.program, self.rule))
        stopped, n_epochs = False, self.config.n_epochs
        while self.epoch <= n_epochs and not stopped:
            stopped = self.train_epoch()
            with self.rule.as_one():
                stopped = stopped or self.validate()
                if stopped or self.epoch % self.config.snapshot_freq == 0 or self.epoch == n_epochs:
                    self.save()
            if not stopped:
                self.epoch, self.position = self.epoch + 1, 0
        self.saver.finish()
        return stopped

    def close(self) -> None:
        """Lets go of the memory of the others, then frees what they have let go of."""
        self.rule.close()
        self.transport.close()
        self.feed.close()
        self.program.close()

    def train_epoch(self) -> bool:
        """The rest of an epoch's steps. Returns whether the trainers agreed to stop."""
        self.begin_epoch()
        while self.position < len(self.dataset.train):
            if self.train_step(self.orders.n_steps("train")):
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
        due = self.rule.is_due(order, len(self.dataset.train))
        printing = self.teller.is_due(order, n_steps, len(self.dataset.train), due)
        ours = (self.control.poll(), self.saver.is_due()), self.recorder.sums() if printing else None
        self.rule.end_backward()
        meeting = self.everyone.meeting(str(order), *ours, self.board.say)
        self.rule.update(self.program.optimizer, meeting if due else None)
        self.recorder.stopwatch.leave()
        self.recorder.count_step(self.rule.bytes_per_meeting() if due else 0, self.everyone.take_bytes())
        self.position = order.stop
        self.replicas.after_step(order, due and self.rule.equal)
        self.teller.tick(order, n_steps)
        (stopping, saving), sums = self.everyone.told(meeting)
        if printing:
            self.losses.examine(sums)
            self.teller.report(order, n_steps, self.program.optimizer.learning_rate, sums)
        if saving and not stopping:
            with self.rule.as_one():
                self.save()
        return stopping

    def _forward_backward(self) -> Order:
        """Of all minibatches of a step: `accumulate`, or what is left of the epoch. Returns the last."""
        order = self._next_order()
        stop = min(order.start + self.orders.step_size("train"), len(self.dataset.train))
        self.everyone.begin_step(order)
        mean_share = (stop - order.start) / self.world.size
        while True:
            self.recorder.stopwatch.enter("compute")
            self.board.say(f"{order}: forward, backward, update")
            self.program.forward_backward(self.feed.batch(), mean_share, self.world.rank, self.recorder)
            self.feed.release()
            self.recorder.end_batch(order)
            if order.stop >= stop:
                return order
            order = self._next_order()

    def _next_order(self) -> Order:
        self.recorder.stopwatch.enter("load-wait")
        self.board.say(f"epoch {self.epoch}: waiting for a minibatch")
        return self.feed.next()

    def validate(self) -> bool:
        """Loss, top-1 and top-5 over the validation images, each counted once. Whether all are to stop.

        Validation that was cut short counts for nothing; a resumed run begins it again.
        """
        begin = time.perf_counter()
        self.program.begin_validation()
        n_images, n_steps = len(self.dataset.val), self.orders.n_steps("val")
        sums = torch.zeros(3, dtype=torch.float64, device=self.program.device)
        for _ in range(n_steps):
            order = self.feed.next()
            self.board.say(f"{order}: validating")
            sums += self.program.count_errors(self.feed.batch())
            self.feed.release()
            if self.everyone.any(f"{order}: validated", self.control.poll()):
                return True
            self.teller.tick(order, n_steps)
        loss, top1, top5 = (each / n_images for each in self.everyone.sums("validation", sums.tolist()))
        check_finite(loss, f"validation of epoch {self.epoch}")
        self.val_record.append({"epoch": self.epoch, "loss": loss, "error_top1": top1, "error_top5": top5})
        self.teller.tell(Validated(self.epoch, loss, top1, top5, n_images, time.perf_counter() - begin))
        return False

    def save(self) -> None:
        """A checkpoint, written behind the training after all have shown that their replicas are equal."""
        self.board.say(f"epoch {self.epoch}: saving a checkpoint")
        self.replicas.before_saving(f"the checkpoint of epoch {self.epoch}")
        place = self.epoch, self.position, len(self.dataset.train)
        self.saver.save(*place, self.val_record, self.rule.state())
