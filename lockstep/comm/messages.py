"""The messages that the processes of a run send each other, and their order.

They carry numbers and text only; a tensor never goes through a pipe. One step of one of several trainers:

    loader r                    trainer r                         the other trainers
       |  <---- Fill(slot) ------  |                                     |
       |  ----- Filled(slot) --->  |  wait Filled            load-wait   |
       |                           |  forward, backward          compute |
       |  <---- Fill(slot) ------  |  the slot is free: order another    |
       |                           |  update                     compute |
       |                           |  --- Arrived(prepared) ----------> |   barrier
       |   (fills the slot         |  <-- Arrived(prepared) ----------- |
       |    meanwhile)             |  average my shard of every arena,   |   exchange
       |                           |  write it to every arena            |
       |                           |  --- Arrived(worked) ------------> |   barrier
       |                           |  <-- Arrived(worked) ------------- |

Before its first order a loader gets `Subtract`, the ring's shape (slots.RingShape) and the handle of its
memory. A loader that replaces a dead one (`loader_restarts`) gets these too, and then all orders that were
not filled. A loader gets `Stop` when no order is left.

No rank averages before all ranks have updated, and none updates again before all shards are written. A `Fill`
also releases its slot: the trainer sends it when it no longer needs the slot's content.

The launcher gets `Ready`, `Started`, `WarningMessage`, `Tick`, `Progress`, `EpochTimes`, `Validated`,
`Saved`, and last `Finished` or `Failed`; it sends `Stop`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Stage = Literal["train", "val"]


@dataclass(frozen=True)
class Order:
    """One trainer's share of one minibatch: positions [first, last) of minibatch [start, stop).

    bounds: With `logical_ranks`, trainer r computes the logical ranks [bounds[r], bounds[r + 1]).
    of_step: With `accumulate`, the positions [first, last) of all minibatches of the step.
    """

    stage: Stage
    epoch: int  # 1 is the first
    step: int  # 1 is the epoch's first
    start: int
    stop: int
    first: int
    last: int
    view: int = 0  # in validation: the crop of each image, see reader.py; 0 is the middle
    bounds: tuple[int, ...] = ()
    of_step: tuple[int, int] | None = None

    @property
    def step_span(self) -> tuple[int, int]:
        """The positions [first, last) of the whole step, whose images may be mixed with each other."""
        return self.of_step or (self.start, self.stop)

    def __str__(self) -> str:
        stage = "" if self.stage == "train" else "validation "
        return f"epoch {self.epoch}, {stage}step {self.step}"


@dataclass(frozen=True)
class Subtract:
    """Trainer to loader: the mean to subtract from R, G and B; None for the dataset's mean image."""

    mean: tuple[float, ...] | None


@dataclass(frozen=True)
class Fill:
    """Trainer to loader: fill this free slot with this order."""

    slot: int
    order: Order


@dataclass(frozen=True)
class Filled:
    """Loader to trainer: the slot holds the order's images."""

    slot: int
    order: Order


@dataclass(frozen=True)
class Arrived:
    """Trainer to every other trainer: it has arrived at this barrier. `payload` is small in a step."""

    point: str
    payload: Any


@dataclass(frozen=True)
class Ready:
    """Process to launcher, first of all; the descriptor of its status board follows."""

    pid: int


@dataclass(frozen=True)
class Started:
    """Trainer 0 to the launcher: all trainers have joined, with equal replicas, and the first step begins.

    implementations: The implementation chosen for each part of the computation, for people.
    """

    implementations: dict[str, str]


@dataclass(frozen=True)
class WarningMessage:
    """Trainer 0 to the launcher: a line for the user."""

    text: str


@dataclass(frozen=True)
class LoaderRestarted:
    """Watching launcher to console: a killed loader was started again, and no trainer.

    Attributes:
        failure: How the killed one ended.
        pid: Of the new one.
        restarts_left: How often this loader can still be started again.
        seconds: From the moment when the launcher knew to the start of the new one.
    """

    name: str
    failure: str
    pid: int
    restarts_left: int
    seconds: float


@dataclass(frozen=True)
class Tick:
    """Trainer 0 to the launcher, a few times a second: its progress."""

    stage: Stage
    epoch: int
    step: int
    n_steps: int
    loss: float | None = None  # of trainer 0 since the last Progress, if reading it is free


@dataclass(frozen=True)
class Straggler:
    """A trainer for which the others wait (runs/stragglers.py).

    Attributes:
        rank: Of the trainer.
        name: Of the trainer, for people: 'trainer 1', or over several hosts 'trainer 1 of host 0'.
        last_share: The share of the steps in which it was the last.
        wait_share: The share of the time that another trainer, on average, waited for it.
        cause: The phase in which it takes longer than the others, or 'other' if none explains the wait.
    """

    rank: int
    name: str
    last_share: float
    wait_share: float
    cause: str


@dataclass(frozen=True)
class Progress:
    """Trainer 0 to the launcher, every print_freq steps. Sums are over all trainers since the last one."""

    epoch: int
    step: int
    n_steps: int
    learning_rate: float
    loss: float  # mean cross-entropy in nats
    # share of wrong top-1 answers, or with task: multilabel of wrong decisions; None if not measured
    error: float | None
    images_per_second: float
    seconds_per_20: float  # "time per 20 iterations"
    seconds: dict[str, float]  # trainer 0's time by phase: load-wait, compute, barrier, exchange
    bytes_per_step: float = 0.0  # between the memory of trainer 0 and of the others of its host
    network_bytes_per_step: float = 0.0  # sent by trainer 0 to other hosts
    straggler: Straggler | None = None  # if one trainer makes the others wait notably


@dataclass(frozen=True)
class RankTimes:
    """A trainer's times in some steps. All numbers are sums, so those of several epochs can be added.

    Attributes:
        rank: Of the trainer.
        n_last: Steps in which it was the last.
        waited: Seconds that another trainer, on average, waited for it in these steps.
        excess: In these steps, its seconds by phase beyond the median of the others.
        seconds: In all steps, its seconds by phase.
    """

    rank: int
    n_last: int
    waited: float
    excess: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class EpochTimes:
    """Trainer 0 to the launcher, after an epoch's last step: who waited for whom.

    Attributes:
        epoch: Its number.
        n_steps: Its steps with a barrier that were measured; of an epoch that was resumed, the rest.
        seconds: Mean over the trainers of the sum of their phases.
        ranks: By rank.
        straggler: If one trainer made the others wait notably.
        n_hosts: The number of hosts, which have equally many trainers.
    """

    epoch: int
    n_steps: int
    seconds: float
    ranks: list[RankTimes]
    straggler: Straggler | None = None
    n_hosts: int = 1


@dataclass(frozen=True)
class Validated:
    """Trainer 0 to the launcher after an epoch's validation, over every validation image once."""

    epoch: int
    loss: float  # mean cross-entropy in nats
    error_top1: float | None  # share of images; None with task: multilabel
    error_top5: float | None  # None with at most five classes
    n_images: int
    seconds: float
    means: dict[str, float] = field(default_factory=dict)  # over classes: macro_f1, balanced_accuracy, ...
    # support, precision, recall, f1 of each; with task: multilabel also average_precision
    classes: dict[str, list[Any]] = field(default_factory=dict)
    confusion: list[list[int]] = field(default_factory=list)  # [label, answer, count] where count is not 0


@dataclass(frozen=True)
class Predictions:
    """Trainer of validate.py to the launcher, after a batch: images from `first` on, in file order."""

    first: int
    labels: list[Any]  # the class; with task: multilabel 0 or 1 of each class
    answers: list[Any]  # the most probable class; with task: multilabel each class's log-probability
    in_top5: list[bool]  # empty with task: multilabel
    losses: list[float]  # cross-entropy in nats


@dataclass(frozen=True)
class Saved:
    """Trainer 0 to the launcher: a checkpoint is complete."""

    path: str


@dataclass(frozen=True)
class Finished:
    """Process to launcher: it has done all its work, or stopped as asked, and exits."""

    stopped: bool = False


@dataclass(frozen=True)
class Failed:
    """Process to launcher: it can't continue.

    kind 'user': The user's input is wrong, and `text` says what to do. 'crash': A bug, with its traceback.
    'lost': The process called `peer` has exited or does not answer. 'faulty': The process's device computes
    wrong numbers.
    """

    kind: Literal["user", "crash", "lost", "faulty"]
    text: str
    traceback: str = ""
    peer: str = ""


@dataclass(frozen=True)
class Stop:
    """Launcher to trainers: finish the step, save and exit. Trainer to loader: exit.

    to_disk: False: save in memory only, because the run resumes at once.
    """

    to_disk: bool = True
