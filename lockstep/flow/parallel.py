"""ParallelExecutor: one network's training step as a graph over several devices, run out of order.

It follows Paddle's design document of the same name; docs/flow.md says what it does and how it differs.
"""

import contextlib
import copy
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError, nearest
from lockstep.flow import private, steps
from lockstep.flow.arrays import Array, bring
from lockstep.flow.capture import capture
from lockstep.flow.collectives import ProcessCollectives
from lockstep.flow.devices import Device
from lockstep.flow.engine import engine_of, in_dry_run, next_number
from lockstep.flow.feeds import Feed, batch_names, split_feed
from lockstep.flow.graph import check_not_ending
from lockstep.flow.lanes import OperationError
from lockstep.flow.made import check_tables
from lockstep.flow.merge import Bits, GradientMerger
from lockstep.flow.program import CapturedProgram
from lockstep.flow.replicas import Buckets, MakeOptimizer, load_all, make_replicas
from lockstep.network import dropout

Loss = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
Strategy = Literal["all_reduce", "reduce"]
Recorder = Callable[[list[steps.DeviceBatch]], Any]
_MOST_PROGRAMS = 64  # kept at once, one per set of shapes and precision
_CAPTURING = threading.RLock()  # captures of several threads take turns: they seed torch's own generator
_SEEDS_APART = 0x9E3779B1  # of processes; torch's generator takes 32 bits of a seed

os.register_at_fork(after_in_child=_CAPTURING._at_fork_reinit)  # type: ignore[attr-defined]


class ParallelExecutor:
    """A trainer of a model on several devices, with the same bits on all and in every repetition.

    Args:
        model: Stays as it is. The devices have copies, in which nn.Dropout becomes SampleDropout.
        loss: loss(model, *batch) returns the mean over its samples, a scalar, or (that, {name: result}).
        optimizer: optimizer(parameters) returns one of torch.optim; called for each bucket and device. The
            parameters have your parameters' marks, such as `bias.no_decay`, and are other objects: tell them
            by marks or shapes.
        devices: At least one.
        strategy: 'all_reduce' adds up gradients and updates on every device. With 'reduce' each bucket has
            an owner, which alone adds up and updates, then broadcasts; devices with one memory share the
            weights.
        gradient_scale: 'mean' (over all samples), 'sum' (of the devices' losses), or a factor per device.
        compress: 'int8' or 'int4': the format of gradients while they are merged.
        bucket_mb: MiB of gradients that are merged together.
        seed: Of dropout.
        group: A torch.distributed group of processes that train together.

    Raises:
        UserError: An argument cannot be used.
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
        if not isinstance(model, nn.Module):
            raise UserError(f"model is an nn.Module, not {model!r}")
        if not callable(optimizer):
            raise UserError(f"optimizer is a function that makes one from parameters, not {optimizer!r}")
        self.devices = _devices(devices)
        self.program: CapturedProgram | None = None  # the newest that ran
        _check(self.devices, strategy, gradient_scale, compress, bucket_mb)
        if not (isinstance(seed, int | np.integer) and 0 <= seed < 2**62):
            raise UserError(f"seed is a whole number, at least 0 and less than 2**62, not {seed!r}")
        self._scale, self._seed, self._names = gradient_scale, int(seed), batch_names(loss, "loss")
        self._processes = None if group is None else ProcessCollectives(group, self.devices[0])
        owner_updates = strategy == "reduce"
        _check_compressed(model, compress)
        self._replicas = make_replicas(model, self.devices, owner_updates)
        n_bytes = int(bucket_mb * 2**20)
        self._buckets = Buckets(self._replicas, optimizer, n_bytes, owner_updates, model)
        if self._processes is not None:
            scale = gradient_scale if isinstance(gradient_scale, str) else "a list"  # of its own devices
            settings = {"bucket_mb": bucket_mb, "compress": compress, "gradient_scale": scale}
            self._processes.check_alike(self._replicas[0], settings | self._buckets.described())
            self._processes.broadcast_model(self._replicas)
        self._merger = GradientMerger(self._replicas, not owner_updates, compress, self._processes)
        self._step = steps.StepRecorder(self._replicas, self._buckets, loss, self._merger, model)
        self._programs: dict[Any, tuple[CapturedProgram, steps.Merged]] = {}
        self._n_runs = 0
        self._failure = ""
        self._loading = False  # whether load_state_dict has begun and not finished
        self._recording = False  # whether a program is being captured

    def run(self, feed: Feed, fetch: Sequence[str] = ("loss",), merge: bool = True) -> dict[str, Any]:
        """Train one step. Return ordinary tensors by name, once all operations have run.

        Args:
            feed: {name of the loss's argument: samples}, split as evenly as possible; or a list of one such
                dictionary per device, of which some may be empty. At least one sample.
            fetch: 'loss', results of the loss by name, and '<parameter>@GRAD', the merged gradient.
            merge: The loss is the mean over this process's samples, scalars are stacked, tensors
                concatenated along the batch. If False, each is a list with one entry per device with samples.

        Raises:
            UserError: The feed or fetch does not fit, or an earlier run failed and load_state_dict was not
                called.
            OperationError: An operation failed.
        """
        if self._failure:
            raise UserError(f"an earlier run has failed ({self._failure}): load_state_dict first")
        self._check_loaded()
        batches = split_feed(feed, self._names, len(self.devices))
        fetch = _names(fetch)
        key = self._key(("run", *fetch), batches)
        shares, fractions = self._shares(batches, key)
        record, first = partial(self._step.record, fetch=fetch), next_number()
        try:
            counted = partial(setattr, self, "_n_runs", self._n_runs + 1)
            found = self._run(key, shares, record, self._step.prepare, counted)
            self._wait()
        except OperationError as error:
            self._failure = str(error)
            self._report_others(error, first)
            raise
        return self._returned(found, fractions, merge)

    def evaluate(
        self,
        function: Callable[..., Any],
        feed: Feed,
        fetch: Sequence[str] = ("loss",),
        merge: bool = True,
    ) -> dict[str, Any]:
        """Call function(model, *batch) in evaluation mode, without gradients.

        Args:
            function: Returns what a loss function does, or only results by name.
            feed: As in `run`.
            fetch: As in `run`.
            merge: As in `run`.
        """
        self._check_loaded()
        batches = split_feed(feed, batch_names(function, "function"), len(self.devices))
        fetch = _names(fetch)
        key = self._key((function, *fetch), batches)
        shares, fractions = self._shares(batches)
        record = partial(self._step.record_evaluation, function, fetch=fetch)
        prepare, first = partial(self._step.prepare_evaluation, function), next_number()
        try:
            found = self._run(key, shares, record, prepare)
        except OperationError as error:
            self._report_others(error, first)
            raise
        return self._returned(found, fractions, merge)

    def set_hyperparameters(self, **values: Any) -> None:
        """Set values of all optimizers from the next run on, as in set_hyperparameters(lr=0.01).

        Raises:
            UserError: The optimizers do not have such a value, or a number's new value is none.
        """
        with contextlib.suppress(OperationError):
            self._wait()  # an interrupted run may still update
        self._buckets.set_hyperparameters(values)

    def replica(self, number: int) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers on one device, by name."""
        if number not in range(len(self.devices)):
            n = len(self.devices)
            raise UserError(f"replica {number}: there are 0 to {n - 1}, the numbers of the devices")
        self._wait_restored()
        return self._replicas[number].copies()

    def memory(self) -> dict[str, int]:
        """Return bytes of 'parameters' and 'optimizer' state on all devices; shared memory counts once."""
        parameters = {id(p.memory): p for r in self._replicas for p in r.parameters.values()}
        n_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        return {"parameters": n_bytes, "optimizer": self._buckets.n_bytes_of_state()}

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict, the optimizers' state by parameter, and what else resuming needs.

        'model' can be loaded into the original model. 'carried' holds the rounding errors of compression.
        """
        self._check_loaded()
        return {
            "model": self._replicas[0].saved(),
            "optimizer": self._buckets.state(),
            "carried": self._merger.state(),
            "runs": self._n_runs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict() returned, for any number of devices.

        After an error or interrupt inside, nothing can be run until it is called again.

        Raises:
            UserError: The state does not fit.
        """
        for replica in self._replicas:  # a buffer that the loss replaces can have a shape on each device
            _check_state(state, replica.state())
        with private.inference_mode(False):  # what a run writes must not become inference tensors
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._wait_restored()
        self._loading = True
        with private.without_modes():  # copies, which may be changed before a first run uses them
            parts = private.tree_map(_ordinary, (state["optimizer"], state["carried"]))
            optimizer, carried = copy.deepcopy(parts)
        load_all(self._replicas, state["model"])
        self._merger.load_state(carried)
        if self._processes is not None:
            self._processes.forget_failure()
        self._wait()
        self._buckets.load_state(optimizer)
        self._n_runs, self._failure, self._loading = state["runs"], "", False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: the optimizers of a copy would update the weights of the original."""
        raise UserError(
            "a ParallelExecutor can't be copied or pickled: make another one, which takes "
            "load_state_dict(executor.state_dict())"
        )

    def _check_loaded(self) -> None:
        if self._loading:
            raise UserError("load_state_dict was interrupted or has failed: call it again")
        self._wait_restored()

    def _wait_restored(self) -> None:
        """Wait until an interrupted capture has undone what its first call of the loss changed.

        Raises:
            UserError: Nothing can be computed here.
        """
        check_not_ending()  # before anything is made: torch aborts if Python's end drops it half-made
        if in_dry_run():
            raise UserError("an executor needs values, and a dry run makes none: use it outside of the scope")
        if self._recording:  # a loss called before the capture has written buffers
            raise UserError("the executor records a step: use it after the run, not in a signal's handler")
        for replica in self._replicas:
            private.call_all([replica.restored.acquire, replica.restored.release])

    def _key(self, what: Any, batches: list[list[torch.Tensor]]) -> Any:
        """Return what decides which program runs: the shapes, for a start, and this thread's precision."""
        shapes = [tuple((part.shape, part.dtype) for part in batch) for batch in batches]
        return (what, _precision(self.devices), *shapes)

    def _shares(self, batches: list[list[torch.Tensor]], key: Any = None) -> tuple[list[Any], list[float]]:
        """Return the batches of the devices with samples, and their fractions of this process's samples.

        Args:
            key: Of a step that all processes run together.
        """
        rows = [len(batch[0]) if batch else 0 for batch in batches]
        counts, rank = [sum(rows)], 0
        if key is not None and self._processes is not None:
            _, merged = self._programs.get(key, (None, None))
            counts = self._processes.gather_steps(sum(rows), self._n_runs, merged)
            rank = self._processes.rank
        total, first = sum(counts), sum(counts[:rank])
        keys = torch.from_numpy(dropout.sample_keys(self._seed, self._n_runs, total))
        shares = []
        for number, (batch, n) in enumerate(zip(batches, rows, strict=True)):
            if n:
                copy = partial(bring, device=self.devices[number])  # copies unless it is an array there
                scale = torch.tensor(self._factor(number, n, total), dtype=torch.float64)
                fraction = torch.tensor(n / total, dtype=torch.float64)
                own = [*map(copy, batch), copy(scale), copy(fraction), copy(keys[first : first + n])]
                shares.append(steps.DeviceBatch(number, own[:-3], *own[-3:]))
            first += n
        return shares, [n / sum(rows) for n in rows if n]

    def _factor(self, number: int, n: int, total: int) -> float:
        if self._scale == "mean":
            return n / total
        return 1.0 if self._scale == "sum" else float(self._scale[number])

    def _run(
        self, key: Any, shares: list[Any], record: Recorder, prepare: Recorder, counted: Any = None
    ) -> dict[str, list[Any]]:
        """Run the program with this key, which is captured the first time.

        `counted`, a C function, counts a step of training when it is submitted: it may be interrupted later.
        """
        inputs = [array for s in shares for array in (*s.batch, s.factor, s.fraction, s.keys)]
        if key not in self._programs:
            try:
                program = self._capture(shares, record, prepare, inputs)
            except Exception as error:
                if counted is not None and self._processes is not None:
                    self._processes.report_failure(error)
                raise
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = program, self._step.merged
        program, merged = self._programs[key]  # a signal's handler may evaluate, which changes self.program
        if counted is not None and self._processes is not None:
            self._processes.check_merged(merged)
        run = None if counted is None else self._n_runs
        found: dict[str, list[Any]] = program.run(inputs, run=run, counted=counted)
        self.program = program
        return found

    def _capture(
        self, shares: list[Any], record: Recorder, prepare: Recorder, inputs: list[Array]
    ) -> CapturedProgram:
        # Random operations other than nn.Dropout add the number of the run. Processes differ, as devices do.
        rank = 0 if self._processes is None else self._processes.rank
        with _CAPTURING, _recording(self, self._seed + rank * _SEEDS_APART):
            prepare(shares)
            made = capture(partial(_record, record, shares), *inputs)
        check_tables([self._replicas[share.device] for share in shares])
        return made

    def _wait(self) -> None:
        for array in [array for replica in self._replicas for array in replica.variables().values()]:
            array.wait()

    def _report_others(self, error: OperationError, first: int) -> None:
        """Report other failures since the operation `first` with an error, which the caller may handle."""
        for engine in dict.fromkeys(map(engine_of, self.devices)):
            engine.report_with(error, first)

    def _returned(self, found: dict[str, list[Any]], fractions: list[float], merge: bool) -> dict[str, Any]:
        if not merge:
            return {
                name: values * len(fractions) if name.endswith(steps.GRAD) else values
                for name, values in found.items()
            }
        with private.without_modes():  # ordinary tensors, also inside of `with flow.device`
            return {
                name: values[0] if name.endswith(steps.GRAD) else _merge_results(name, values, fractions)
                for name, values in found.items()
            }


class _recording(private.Scope):  # noqa: N801
    """A scope in which the executor can't be used.

    torch's generator, from which arrays draw their seeds, begins with this seed.
    """

    def __init__(self, executor: ParallelExecutor, seed: int) -> None:
        self._set, self._seed = partial(setattr, executor, "_recording"), seed

    def calls(self) -> tuple[list[Any], list[Any]]:
        generator = torch.default_generator
        restore = partial(generator.set_state, generator.get_state())
        begin = [partial(self._set, True), partial(generator.manual_seed, self._seed)]
        return begin, [restore, partial(self._set, False)]


def _record(record: Recorder, shares: list[Any], *inputs: Array) -> Any:
    """Record the step with the program's inputs in place of the examples."""
    left = iter(inputs)
    own = []
    for share in shares:
        batch = [next(left) for _ in share.batch]
        own.append(steps.DeviceBatch(share.device, batch, next(left), next(left), next(left)))
    return record(own)


def _precision(devices: Sequence[Device]) -> tuple[Any, ...]:
    """Return this thread's settings of torch that decide dtypes in a program."""
    kinds = sorted({device.torch_device.type for device in devices})
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    return torch.get_default_dtype(), torch.is_autocast_cache_enabled(), *autocast


def _ordinary(value: Any) -> Any:
    """Return an array as an ordinary tensor, which an optimizer can use in a worker."""
    return value.tensor() if isinstance(value, Array) else value


def _names(fetch: Sequence[str]) -> list[str]:
    names = [fetch] if isinstance(fetch, str) else fetch
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise UserError(f"fetch is a name or a list of names, not {fetch!r}")
    return list(dict.fromkeys(names))


def _devices(given: Any) -> list[Device]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UserError(f"devices is a list, as flow.cpus(2) makes it, not {given!r}")
    other = [each for each in given if not isinstance(each, Device)]
    if other:
        raise UserError(f"devices is a list of devices, as flow.cpus(2) makes it; {other[0]!r} is none")
    return list(given)


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
    elif not isinstance(scale, Collection) or not all(map(_is_finite, scale)):
        raise UserError(
            f"gradient_scale is mean, sum, or a list of numbers, one for each device, not {scale}"
        )
    elif len(scale) != len(devices):
        raise UserError(
            f"gradient_scale has {len(scale)} factors for {len(devices)} devices: give one for each"
        )
    if not _is_finite(bucket_mb) or bucket_mb <= 0:
        raise UserError(f"bucket_mb is a number, more than 0, not {bucket_mb!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _check_compressed(model: nn.Module, compress: str | None) -> None:
    for name, parameter in model.named_parameters() if compress is not None else ():
        if not parameter.is_floating_point():
            raise UserError(f"compress: {name} is {parameter.dtype}: only real numbers can be compressed")


def _check_state(state: Any, own: Mapping[str, Any]) -> None:
    """Raise UserError unless the state is one that state_dict() returned for a model with this state."""
    if not isinstance(state, Mapping):
        raise UserError(
            f"load_state_dict: {type(state).__name__} is no state: give what state_dict() returned"
        )
    missing = [key for key in ("model", "optimizer", "carried", "runs") if key not in state]
    if missing:
        raise UserError(f"load_state_dict: the state has no {missing[0]}: give what state_dict() returned")
    kinds = {"model": Mapping, "optimizer": Mapping, "carried": Mapping, "runs": int}
    wrong = [key for key, kind in kinds.items() if not isinstance(state[key], kind)]
    if wrong:
        kind = type(state[wrong[0]]).__name__
        raise UserError(f"load_state_dict: {wrong[0]} is {kind}: give what state_dict() returned")
    if state["runs"] < 0:
        raise UserError(f"load_state_dict: runs is {state['runs']}: it must be 0 or more")
    given = dict(state["model"])
    for name in {**own, **given}:
        if name not in own or name not in given:
            where = "the model" if name in given else "the state"
            raise UserError(f"load_state_dict: {where} has no {name}")
        if not isinstance(own[name], Array):  # a module's extra state
            continue
        if not isinstance(given[name], torch.Tensor):
            raise UserError(f"load_state_dict: {name} is {given[name]!r:.50}, not a tensor")
        if own[name].shape != given[name].shape:
            shapes = f"{tuple(own[name].shape)} in the model, {tuple(given[name].shape)} in the state"
            raise UserError(f"load_state_dict: {name} is {shapes}")


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"{key} is {' or '.join(choices)}, not '{value}'{nearest(str(value), choices)}")


def _merge_results(name: str, values: Sequence[Any], fractions: Sequence[float]) -> torch.Tensor:
    """Return one tensor from those of the devices with samples.

    The loss becomes the mean over samples; other scalars are stacked, tensors concatenated along the batch.

    Args:
        fractions: The fraction of all samples of each device.

    Raises:
        UserError: A result is no tensor or number, or the shapes differ.
    """
    try:
        tensors = [torch.as_tensor(value) for value in values]
        if name != "loss":
            return torch.stack(tensors) if not tensors[0].dim() else torch.cat(tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the devices' results '{name}' can't be merged: {error}. merge=False returns a list of them"
        ) from error
    total = tensors[0] * fractions[0]
    for tensor, fraction in zip(tensors[1:], fractions[1:], strict=True):
        total = total + tensor * fraction
    return total
