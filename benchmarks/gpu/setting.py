"""The sizes of a measurement, and those of a rehearsal."""

from dataclasses import dataclass
from typing import Any

from benchmarks.exchange.all_reduce import N_ELEMENTS


@dataclass(frozen=True)
class Setting:
    """Sizes and lengths of everything; those of one section are named after it."""

    rehearsal: bool
    model: str
    model_args: dict[str, Any]
    residual_model: str
    batch_size: int
    picture: int  # rows and columns in the files
    n_classes: int
    n_files: int  # of the training set, a minibatch each
    n_links: int  # names that each file has: an epoch is as long as n_files * n_links minibatches
    turn_seconds: float  # how long a turn is timed
    least_steps: int  # of a turn
    # before each turn's clock: caches, clocks, and a loader's ring, which was full in advance
    warm_steps: int
    n_rounds: int
    phase_steps: int  # whose phases are timed where batches come from a loader
    layer_calls: int  # in one turn
    copy_bytes: int  # of one copy whose rate is measured, in each direction
    matrix: int  # rows and columns of the product whose rate is measured
    exchange_elements: int
    exchange_calls: int  # in one turn
    exchange_seconds: float  # for one measurement of two ranks
    table1_freq: int  # steps between lines of progress
    table1_seconds: float  # for one run of train.py

    @property
    def n_images(self) -> int:
        return self.batch_size * self.n_files * self.n_links


REAL = Setting(
    rehearsal=False,
    model="alexnet",
    model_args={"variant": "theano_alexnet"},
    residual_model="resnet50",
    batch_size=256,
    picture=256,
    n_classes=1000,
    n_files=20,  # 1 GB: more than processors' caches hold
    n_links=4,
    turn_seconds=0.4,
    least_steps=5,
    warm_steps=8,
    n_rounds=7,
    phase_steps=60,
    layer_calls=10,
    copy_bytes=1 << 30,
    matrix=8192,
    exchange_elements=N_ELEMENTS,
    exchange_calls=20,
    exchange_seconds=40,
    table1_freq=20,
    table1_seconds=60,
)

REHEARSAL = Setting(
    rehearsal=True,
    model="smallnet",
    model_args={},
    residual_model="resnet20",
    batch_size=8,
    picture=36,
    n_classes=10,
    n_files=4,
    n_links=2,
    turn_seconds=0.02,
    least_steps=2,
    warm_steps=1,
    n_rounds=1,
    phase_steps=2,
    layer_calls=2,
    copy_bytes=1 << 20,
    matrix=64,
    exchange_elements=16 * 1000,
    exchange_calls=2,
    exchange_seconds=300,
    table1_freq=2,
    table1_seconds=300,
)
