"""The messages that the processes of a run send each other, and when.

Numbers and text only; a tensor never goes through a pipe. One step, with one trainer of several shown:

    loader r                    trainer r                         the other trainers
       |  <---- Fill(slot) ------  |                                     |
       |  ----- Filled(slot) --->  |  wait Filled            load-wait   |
       |                           |  forward, backward          compute |
       |  <---- Fill(slot) ------  |  the slot is free: order another    |
       |                           |  update                     compute |
       |                           |  --- Arrived(offered) -----------> |   meet
       |   (fills the slot         |  <-- Arrived(offered) ------------ |
       |    meanwhile)             |  average my shard of every arena,   |   exchange
       |                           |  write it to every arena            |
       |                           |  --- Arrived(worked) ------------> |   meet
       |                           |  <-- Arrived(worked) ------------- |

Before its first order a loader gets `Subtract`, the ring's shape (slots.RingShape) and the handle of its
memory. So does one that is started in the place of a loader that died (`loader_restarts`), and then all
orders that were not filled; it gets `Stop` where nothing is left to be done.

No rank averages before all have updated, and none updates again before all shards are written. A `Fill` is
also the release of its slot: the trainer sends it when it has done with what the slot held.

The launcher gets `Ready`, `Started`, `Notice`, `Tick`, `Progress`, `Validated`, `Saved`, and last `Finished`
or `Failed`; it sends `Stop`.
"""

from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["train", "val"]


@dataclass(frozen=True)
class Order:
    """One trainer's part of one minibatch: positions [first, last) of minibatch [start, stop)."""

    stage: Stage
    epoch: int  # 1 is the first
    step: int  # 1 is the epoch's first
    start: int
    stop: int
    first: int
    last: int
    view: int = 0  # of validation: which crop of each image, see reader.py; 0 is the middle

    def __str__(self) -> str:
        stage = "" if self.stage == "train" else "validation "
        return f"epoch {self.epoch}, {stage}step {self.step}"


@dataclass(frozen=True)
class Subtract:
    """Trainer to loader: what the network wants subtracted from R, G and B, or None: the dataset's mean."""

    mean: tuple[float, ...] | None


@dataclass(frozen=True)
class Fill:
    """Trainer to loader: fill this slot, which is free, with this order."""

    slot: int
    order: Order


@dataclass(frozen=True)
class Filled:
    """Loader to trainer: the slot holds what was ordered."""

    slot: int
    order: Order


@dataclass(frozen=True)
class Arrived:
    """Trainer to every other trainer: I have come to this point. `payload` is small in a step."""

    point: str
    payload: Any


@dataclass(frozen=True)
class Ready:
    """First message of a process to the launcher; the descriptor of its status board follows."""

    pid: int


@dataclass(frozen=True)
class Started:
    """Trainer 0 to the launcher: all trainers are there, with equal replicas; the first step comes next.

    ways: which way its parts are computed, by name, in words.
    """

    ways: dict[str, str]


@dataclass(frozen=True)
class Notice:
    """Trainer 0 to the launcher: a line that the user should see."""

    text: str


@dataclass(frozen=True)
class Tick:
    """Trainer 0 to the launcher, a few times a second: how far it is."""

    stage: Stage
    epoch: int
    step: int
    n_steps: int


@dataclass(frozen=True)
class Progress:
    """Trainer 0 to the launcher, every print_freq steps. Sums are over all trainers since the last one."""

    epoch: int
    step: int
    n_steps: int
    learning_rate: float
    loss: float  # mean cross-entropy in nats
    error: float | None  # share of wrong top-1 answers, or None where it isn't wanted
    images_per_second: float
    seconds_per_20: float  # "time per 20 iterations"
    seconds: dict[str, float]  # trainer 0's time by phase: load-wait, compute, meet, exchange
    bytes_per_step: float = 0.0  # between trainer 0's memory and that of the others of its host
    network_bytes_per_step: float = 0.0  # that trainer 0 has sent to other hosts


@dataclass(frozen=True)
class Validated:
    """Trainer 0 to the launcher after an epoch's validation, over every validation image once."""

    epoch: int
    loss: float  # mean cross-entropy in nats
    error_top1: float  # share of images
    error_top5: float
    n_images: int
    seconds: float


@dataclass(frozen=True)
class Predictions:
    """A trainer of validate.py to the launcher, after a batch: images from `first` on, in file order."""

    first: int
    labels: list[int]
    answers: list[int]  # the class found most probable
    in_top5: list[bool]
    losses: list[float]  # cross-entropy in nats


@dataclass(frozen=True)
class Saved:
    """Trainer 0 to the launcher: a checkpoint is complete."""

    path: str


@dataclass(frozen=True)
class Finished:
    """A process to the launcher: it has done all its work (or stopped as asked) and leaves."""

    stopped: bool = False


@dataclass(frozen=True)
class Failed:
    """A process to the launcher: it can't go on.

    kind 'user': the user's input is wrong, `text` says what to do. 'crash': a bug, with its traceback.
    'lost': the process called `peer` went away or did not answer.
    """

    kind: Literal["user", "crash", "lost"]
    text: str
    traceback: str = ""
    peer: str = ""


@dataclass(frozen=True)
class Stop:
    """Launcher to trainers: finish the step, save, leave. Trainer to loader: leave."""
