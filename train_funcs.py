"""One trainer among any number: build the network, take steps, exchange, validate and save checkpoints."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from lockstep.backends import backend_of
from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order, Started
from lockstep.comm.pipes import Pipe
from lockstep.data.dataset import open_dataset
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import open_feed
from lockstep.loading.orders import Orders
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder
from lockstep.network.replica import Replica
from lockstep.optim.schedules import learning_rate
from lockstep.pretrained.initial_state import begin
from lockstep.runs.metrics import error_of
from lockstep.runs.plan import RunPlan
from lockstep.trainer.balancing import Balancer
from lockstep.trainer.coordinator import Coordinator, StepReport
from lockstep.trainer.postmortem import Losses
from lockstep.trainer.progress import ProgressReporter, warnings_of
from lockstep.trainer.saving import Saver, wants_disk
from lockstep.trainer.setup import computing, open_exchange
from lockstep.trainer.validation import Validator


def run_trainer(
    control: Pipe,
    board: StatusBoard,
    plan: RunPlan,
    world: World,
    loaders: list[Connection],
    peers: dict[int, Connection],
) -> bool:
    """Run the process of trainer `world.rank`. Return whether the launcher stopped it early."""
    group = Group.connected(world, peers, plan.config.timeout)
    pipes = [Pipe(end, f"loader {world.local_rank}", plan.config.timeout) for end in loaders]
    board.say("opening the dataset and building the network")
    with computing(plan.config, world, board):
        trainer = Trainer(plan, group, control, board, pipes)
        stopped = trainer.run()
        trainer.close()
    return stopped


class Trainer:
    """A replica of the network, its batches (`orders`: by default the run's), its part in the exchange."""

    def __init__(
        self,
        plan: RunPlan,
        group: Group,
        control: Pipe,
        board: StatusBoard,
        loaders: Sequence[Pipe] = (),
        orders: Iterator[Order] | None = None,
    ) -> None:
        config, dataset = plan.config, open_dataset(plan.config)
        self.config, self.dataset, self.control, self.board = config, dataset, control, board
        self.backend = backend_of(config.devices[group.world.local_rank])
        self.backend.start_computing(config)
        self.program: Program = Replica(config, dataset, self.backend.memory, plan.retained_names())
        self.recorder = Recorder(self.program.device, self.backend.stopwatch())
        self.coordinator = Coordinator.joined(group, plan, self.program.arena.flat)
        self.reporter = ProgressReporter(control, self.coordinator, config, self.recorder)
        self.program.warn = self.reporter.warn
        start = begin(plan, self.program, board.say)
        self.epoch, self.position = start.epoch, start.position
        self.val_record, self.has_ended = start.val_record, start.has_ended
        board.say("opening the arenas of the others")
        self.exchange = open_exchange(
            config, self.backend, self.program, group, self.coordinator, self.recorder, start.of_rule
        )
        self.orders = Orders(config, self.coordinator.world, len(dataset.train), len(dataset.val))
        self._make_helpers(plan)
        orders = orders or self.orders.since(self.epoch, self.position)
        self.feed = open_feed(self.backend, config, dataset, self.program, orders, board.say, loaders)

    def _make_helpers(self, plan: RunPlan) -> None:
        """Make what checks losses, saves checkpoints, validates, and balances the trainers' shares."""
        self.losses = Losses(plan, self.program, self.recorder, self.coordinator, self.dataset.train)
        self.saver = Saver(
            plan,
            self.program,
            self.reporter,
            self.dataset,
            world=self.coordinator.world,
            rule_bytes=self.exchange.rule.state_bytes(),
            stopwatch=self.recorder.stopwatch,
        )
        self.validator = Validator(
            self.program, self.coordinator, self.reporter, self.orders, self.dataset, self.control, self.board
        )
        self.balancer = Balancer(self.orders, self.recorder, self.coordinator, self.reporter)

    def run(self) -> bool:
        """Train and validate epoch by epoch. Return whether the launcher stopped the run early."""
        self.reporter.send(Started({**self.program.implementations}))
        self.reporter.warn(*warnings_of(self.config, self.dataset, self.program, self.exchange.rule))
        stopped, ended, n_epochs = False, self.has_ended, self.config.n_epochs
        self.saver.begin_receipts(self.save)
        while self.epoch <= n_epochs and not stopped and not ended:
            stopped = self.train_epoch()
            with self.exchange.rule.averaged():
                if not stopped and self.orders.validates(self.epoch):
                    stopped = self.validate()
                ended = self.validator.ends_run(self.val_record)
                if stopped or ended or self.saver.is_due_after(self.epoch, self.val_record):
                    self.save(not stopped or wants_disk(self.control))
            self.epoch, self.position = (self.epoch, self.position) if stopped else (self.epoch + 1, 0)
        self.saver.finish()
        return stopped

    def close(self) -> None:
        """Close the other trainers' memory, then free what they have closed."""
        self.exchange.close()
        self.feed.close()
        self.program.close()

    def train_epoch(self) -> bool:
        """Take the rest of the epoch's steps. Return whether the trainers agreed to stop."""
        self.begin_epoch()
        while self.position < len(self.dataset.train):
            if self.train_step(self.orders.n_steps("train")):
                return True
        self.losses.examine_all()
        self.reporter.end_epoch(self.epoch)
        return False

    def begin_epoch(self) -> None:
        """Set the epoch's learning rate and dropout keys, and restart the clock."""
        self.program.begin_epoch(self.epoch, len(self.dataset.train), self._learning_rate(), self.position)
        self.reporter.begin()

    def _learning_rate(self) -> float:
        """Return the rate of the step that begins at the present position."""
        errors = [error_of(entry) for entry in self.val_record]
        return learning_rate(self.config, self.epoch, errors, self.position / len(self.dataset.train))

    def train_step(self, n_steps: int) -> bool:
        """Take one step: load, forward, backward, update, exchange. Return whether the trainers stop."""
        self.program.optimizer.set_learning_rate(self._learning_rate())
        order, rule = self._forward_backward(), self.exchange.rule
        due = rule.is_due(order, len(self.dataset.train))
        shown = self.reporter.is_due(order, n_steps, len(self.dataset.train), due)
        sums = self.recorder.sums() if shown else None
        report = StepReport(self.control.poll(), self.saver.is_due(), sums, self.saver.is_copy_due())
        rule.end_backward()
        step_barrier = self.coordinator.step_barrier(order, report, self.board.say)
        rule.update(self.program.optimizer, step_barrier if due else None)
        self.recorder.count_step(rule.bytes_per_sync() if due else 0, self.coordinator.take_bytes(), due)
        self.position = order.stop
        self.exchange.after_step(order, due)
        self.board.count_step(order.epoch, order.step)
        self.reporter.tick(order, n_steps)
        outcome = self.coordinator.outcome(step_barrier)
        if shown:
            self.losses.examine(outcome.sums)
            self.reporter.report(order, n_steps, self.program.optimizer.learning_rate, outcome.sums)
        receipt = self.saver.is_receipt_due(order, n_steps)
        if (outcome.save or outcome.copy or receipt) and not outcome.stop:
            with self.saver.measured(), rule.averaged():
                self.save(outcome.save, receipt)
        self.balancer.after_step(order)
        return outcome.stop

    def _forward_backward(self) -> Order:
        """Accumulate gradients over the batches of one step. Return the order of the last one."""
        world = self.coordinator.world
        while True:
            self.recorder.stopwatch.enter("load-wait")
            self.board.say(f"epoch {self.epoch}: waiting for a minibatch")
            order = self.feed.next()
            self.recorder.stopwatch.enter("compute")
            self.board.say(f"{order}: forward, backward, update")
            first, stop = order.step_span
            mean_n_samples = (stop - first) / world.size
            self.program.forward_backward(self.feed.batch(), mean_n_samples, world.rank, self.recorder)
            self.feed.release()
            self.recorder.end_batch(order)
            if order.stop == stop:
                return order

    def validate(self) -> bool:
        """Measure the validation images and record the result. Return whether the trainers stop."""
        entry = self.validator.measure(self.epoch, self.feed)
        self.val_record += [entry] if entry else []
        return entry is None

    def save(self, to_disk: bool = True, receipt: bool = False) -> None:
        """Check that all replicas are equal, copy the state, and start to write what is asked for."""
        self.board.say(f"epoch {self.epoch}: saving a checkpoint")
        self.losses.examine_all()
        self.saver.finish()  # first: no host replaces a copy before the newer one is whole on all
        self.exchange.replicas.before_saving(f"the checkpoint of epoch {self.epoch}")
        state = self.exchange.rule.state()
        self.saver.save(self.epoch, self.position, self.val_record, state, to_disk, receipt)
