"""ParallelExecutor: one network's training step as a graph over several devices, run out of order.

After Paddle's design document of the same name; docs/flow.md tells what it does and how it differs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from lockstep.errors import UserError, nearest
from lockstep.flow import steps
from lockstep.flow.arrays import Array
from lockstep.flow.capture import capture
from lockstep.flow.compress import Bits
from lockstep.flow.devices import Device
from lockstep.flow.groups import Processes
from lockstep.flow.lanes import OperationError
from lockstep.flow.merger import Merger
from lockstep.flow.program import Program
from lockstep.flow.recording import device as on_device
from lockstep.flow.replicas import Buckets, MakeOptimizer, start_up
from lockstep.flow.shares import Feed, batch_names, merged, split
from lockstep.flow.transfers import bring
from lockstep.network import dropout

Loss = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
Strategy = Literal["all_reduce", "reduce"]
Recorder = Callable[[list[steps.Share]], Any]
_MOST_PROGRAMS = 64  # that are kept, for as many sets of shapes


class ParallelExecutor:
    """Trains a model on several devices at once, with the same bits on all and in every repetition.

    model: stays as it is; the devices have copies, in which nn.Dropout becomes SampleDropout.
    loss: loss(model, *batch) gives the mean over its samples, a scalar, or (that, {name: result}).
    optimizer: optimizer(parameters) makes one of torch.optim; it is called for each bucket and device.
    strategy: 'all_reduce' adds gradients up everywhere and updates everywhere; with 'reduce' each bucket has
    an owner, which alone adds up and updates, then broadcasts; devices with one memory share the weights.
    gradient_scale: 'mean' (over all samples), 'sum' (of the devices' losses), or a factor for each device.
    compress: 'int8' or 'int4' for gradients on their way. bucket_mb: MiB of gradients merged together.
    seed: of dropout. group: a torch.distributed group of processes that train together.
    Raises UserError for what can't be used of these.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Loss],
        optimizer: MakeOptimizer,
        devices: Sequence[Device],
        *,
        strategy: Strategy = "all_reduce",
        gradient_scale: Literal["mean", "sum"] | Sequence[float] = "mean",
        compress: Bits | None = None,
        bucket_mb: float = 4,
        seed: int = 0,
        group: Any = None,
    ) -> None:
        self.devices = list(devices)
        self.program: Program | None = None  # the one that was run last
        _check(self.devices, strategy, gradient_scale, compress, bucket_mb)
        self._scale, self._seed, self._names = gradient_scale, seed, batch_names(loss, "loss")
        self._processes = None if group is None else Processes(group, self.devices[0])
        if self._processes is not None:
            self._processes.broadcast_model(model)
        owner_updates = strategy == "reduce"
        self._replicas = start_up(model, self.devices, owner_updates)
        n_bytes = int(bucket_mb * 2**20)
        self._buckets = Buckets(self._replicas, optimizer, n_bytes, owner_updates)
        self._merger = Merger(self._replicas, not owner_updates, compress, self._processes)
        self._step = steps.Step(self._replicas, self._buckets, loss, self._merger)
        self._programs: dict[Any, Program] = {}
        self._n_captured = self._n_runs = 0
        self._failure = ""

    def run(self, feed: Feed, fetch: Sequence[str] = ("loss",), merge: bool = True) -> dict[str, Any]:
        """One step of training. Returns ordinary tensors by name, once all its operations have run.

        feed: {name of the loss's argument: samples}, split as evenly as possible, one sample or more; or a
        list of one such a device, of which some may be empty. fetch: 'loss', results of the loss by name, and
        '<parameter>@GRAD', the merged gradient. merge: the loss is the mean over samples (of this process),
        scalars are stacked, tensors concatenated along the batch; without, each is a list of one a device
        with samples. Raises UserError for a feed or fetch that does not fit, and OperationError where an
        operation failed; after that it refuses to run until load_state_dict.
        """
        if self._failure:
            raise UserError(f"an earlier run has failed ({self._failure}): load_state_dict first")
        batches = split(feed, self._names, len(self.devices))
        fetch = _names(fetch)
        shares, fractions = self._shares(batches)
        record = partial(self._step.record, fetch=fetch)
        try:
            found = self._run(("run", *fetch), shares, record, self._step.prepare)
            self._wait()
        except OperationError as error:
            self._failure = str(error)
            raise
        self._n_runs += 1
        return self._returned(found, fractions, merge)

    def evaluate(
        self,
        function: Callable[..., Any],
        feed: Feed,
        fetch: Sequence[str] = ("loss",),
        merge: bool = True,
    ) -> dict[str, Any]:
        """function(model, *batch) on the same variables, in evaluation mode, without gradients.

        It returns what a loss function does, or results by name only. Everything else is as in `run`.
        """
        batches = split(feed, batch_names(function, "function"), len(self.devices))
        fetch = _names(fetch)
        shares, fractions = self._shares(batches, together=False)
        record = partial(steps.record_evaluation, self._replicas, function, fetch=fetch)
        return self._returned(self._run((function, *fetch), shares, record, record), fractions, merge)

    def set_hyperparameters(self, **values: Any) -> None:
        """Of all optimizers, from the next run on: set_hyperparameters(lr=0.01).

        Raises UserError for one that they do not have.
        """
        self._buckets.set_hyperparameters(values)

    def replica(self, number: int) -> dict[str, torch.Tensor]:
        """Copies of the parameters and buffers on one device, by name."""
        if not 0 <= number < len(self.devices):
            raise UserError(f"replica {number}: there are 0 to {len(self.devices) - 1}")
        return {name: array.tensor() for name, array in self._replicas[number].variables().items()}

    def memory(self) -> dict[str, int]:
        """Bytes of 'parameters' and of the 'optimizer' state on all devices; what is shared counts once."""
        parameters = {id(p.memory): p for r in self._replicas for p in r.parameters.values()}
        n_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        return {"parameters": n_bytes, "optimizer": self._buckets.n_bytes_of_state()}

    def state_dict(self) -> dict[str, Any]:
        """Variables, the optimizers' state by parameter, what compressing carries, and the number of runs."""
        return {
            "model": self.replica(0),
            "optimizer": self._buckets.state(),
            "carried": self._merger.state(),
            "runs": self._n_runs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What state_dict() gave, with any number of devices. Raises UserError where it does not fit."""
        missing = [key for key in ("model", "optimizer", "carried", "runs") if key not in state]
        if missing:
            raise UserError(
                f"load_state_dict: the state has no {missing[0]}: give what state_dict() returned"
            )
        own, given = self._replicas[0].variables(), dict(state["model"])
        for name in {**own, **given}:
            if name not in own or name not in given:
                where = "the model" if name in given else "the state"
                raise UserError(f"load_state_dict: {where} has no {name}")
            if own[name].shape != given[name].shape:
                shapes = f"{tuple(own[name].shape)} in the model, {tuple(given[name].shape)} in the state"
                raise UserError(f"load_state_dict: {name} is {shapes}")
        for replica in self._replicas:
            with on_device(replica.device), torch.no_grad():
                for name, array in replica.variables().items():
                    array.detach().copy_(given[name])
        self._merger.load_state(state["carried"])
        self._wait()
        self._buckets.load_state(state["optimizer"])
        self._n_runs, self._failure = state["runs"], ""

    def _shares(
        self, batches: list[list[torch.Tensor]], together: bool = True
    ) -> tuple[list[Any], list[float]]:
        """What each device with samples is given, and its part of the samples of this process."""
        rows = [len(batch[0]) if batch else 0 for batch in batches]
        counts, rank = [sum(rows)], 0
        if together and self._processes is not None:
            counts, rank = self._processes.gather(sum(rows)), self._processes.rank
        total, first = sum(counts), sum(counts[:rank])
        keys = torch.from_numpy(dropout.sample_keys(self._seed, self._n_runs, total))
        shares = []
        for number, (batch, n) in enumerate(zip(batches, rows, strict=True)):
            if n:
                here = partial(bring, device=self.devices[number])  # copies what is no array there
                scale = torch.tensor(self._factor(number, n, total), dtype=torch.float64)
                fraction = torch.tensor(n / total, dtype=torch.float64)
                own = [*map(here, batch), here(scale), here(fraction), here(keys[first : first + n])]
                shares.append(steps.Share(number, own[:-3], *own[-3:]))
            first += n
        return shares, [n / sum(rows) for n in rows if n]

    def _factor(self, number: int, n: int, total: int) -> float:
        if self._scale == "mean":
            return n / total
        return 1.0 if self._scale == "sum" else float(self._scale[number])

    def _run(self, what: Any, shares: list[Any], record: Recorder, prepare: Recorder) -> dict[str, list[Any]]:
        """Runs the program for these shapes, which is captured when they come for the first time."""
        inputs = [array for s in shares for array in (*s.batch, s.factor, s.fraction, s.keys)]
        key = (what, *((s.device, len(s.batch)) for s in shares), *((a.shape, a.dtype) for a in inputs))
        program = self._programs.get(key)
        if program is None:
            program = self._capture(shares, record, prepare, inputs)
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = program
        self.program = program
        found: dict[str, list[Any]] = program(*inputs)
        return found

    def _capture(
        self, shares: list[Any], record: Recorder, prepare: Recorder, inputs: list[Array]
    ) -> Program:
        self._n_captured += 1
        with torch.random.fork_rng(devices=[]):  # of random operations that are no nn.Dropout
            torch.manual_seed(self._seed + self._n_captured)
            prepare(shares)
            return capture(partial(_record, record, shares), *inputs)

    def _wait(self) -> None:
        for replica in self._replicas:
            for array in replica.variables().values():
                array.wait()

    def _returned(self, found: dict[str, list[Any]], fractions: list[float], merge: bool) -> dict[str, Any]:
        if not merge:
            copies = len(fractions)
            return {
                name: values * copies if name.endswith(steps.GRAD) else values
                for name, values in found.items()
            }
        return {
            name: values[0] if name.endswith(steps.GRAD) else merged(name, values, fractions)
            for name, values in found.items()
        }


def _record(record: Recorder, shares: list[Any], *inputs: Array) -> Any:
    """The program's own inputs in the places of the examples."""
    left = iter(inputs)
    own = []
    for share in shares:
        batch = [next(left) for _ in share.batch]
        own.append(steps.Share(share.device, batch, next(left), next(left), next(left)))
    return record(own)


def _names(fetch: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([fetch] if isinstance(fetch, str) else fetch))


def _check(devices: list[Device], strategy: str, scale: Any, compress: str | None, bucket_mb: float) -> None:
    if not devices:
        raise UserError("devices: give at least one, as flow.cpus(2) makes them")
    if len(set(devices)) < len(devices):
        raise UserError("devices: one is there twice; flow.cpus(n) splits the cores into n devices")
    _check_choice("strategy", strategy, get_args(Strategy))
    if compress is not None:
        _check_choice("compress", compress, get_args(Bits))
    if isinstance(scale, str):
        _check_choice("gradient_scale", scale, ("mean", "sum"))
    elif not all(isinstance(factor, int | float) for factor in scale):
        raise UserError(
            f"gradient_scale is mean, sum, or a list of numbers, one for each device, not {scale}"
        )
    elif len(scale) != len(devices):
        raise UserError(
            f"gradient_scale has {len(scale)} factors for {len(devices)} devices: give one for each"
        )
    if not bucket_mb > 0:
        raise UserError(f"bucket_mb is more than 0, not {bucket_mb}")


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"{key} is {' or '.join(choices)}, not '{value}'{nearest(str(value), choices)}")
