"""The functions that ParallelExecutor captures: a training step of all devices, and an evaluation."""

import _thread
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.errors import UserError, nearest, warn
from lockstep.flow import collectives, placement, private
from lockstep.flow.arrays import Array, array_leaves
from lockstep.flow.creation import device as on_device
from lockstep.flow.made import check_made, check_undone
from lockstep.flow.merge import GradientMerger
from lockstep.flow.operations import operation
from lockstep.flow.replicas import Bucket, Buckets, ModelReplica
from lockstep.network import dropout

GRAD = "@GRAD"
Losses = Callable[..., Any]
Gradients = dict[int, dict[str, Array]]  # by the device's number, then by the parameter's name
Merged = tuple[tuple[str, ...], ...]  # the names of what a step merges, by exchange, in their order


@dataclass
class DeviceBatch:
    """The arrays of one device with samples.

    Attributes:
        device: Number of the device.
        factor: The gradient of its loss.
        fraction: Its fraction of all samples.
        keys: Of its samples' dropout.
    """

    device: int
    batch: list[Array]
    factor: Array
    fraction: Array
    keys: Array


class StepRecorder:
    """Records forward and backward on each device, the merging of gradients, and updates.

    Attributes:
        merged: Of the step that was recorded last.
    """

    merged: Merged = ()

    def __init__(
        self,
        replicas: Sequence[ModelReplica],
        buckets: Buckets,
        loss: Losses,
        merger: GradientMerger,
        model: nn.Module,
    ) -> None:
        self._replicas, self._buckets, self._loss, self._merger = replicas, buckets, loss, merger
        self._originals = weakref.WeakValueDictionary(model.named_parameters())  # they may outlive the model
        self._renormalized = _renormalized(replicas, merger)
        self._order: list[str] = []
        self._warned: set[str] = set()
        for replica in replicas:
            for name, parameter in replica.parameters.items():
                if parameter.requires_grad:
                    parameter.register_hook(partial(self._note, name))

    def _note(self, name: str, _gradient: torch.Tensor) -> None:
        """Note that a parameter's gradient is complete."""
        self._order.append(name)

    def record(self, shares: Sequence[DeviceBatch], fetch: Sequence[str]) -> dict[str, list[Any]]:
        """Record a step. Return the fetched values of each device with samples; gradients are merged."""
        results: dict[str, list[Any]] = {}
        gradients: Gradients = {}
        for share in shares:
            found, gradients[share.device] = self._forward_and_backward(share)
            for name, value in found.items():
                results.setdefault(name, []).append(value)
        written = [*self._written_buffers(shares), *self._written(shares)]
        reached = gradients[shares[0].device]
        self._check_reached(gradients)
        _check_fetch(fetch, [*results, *(name + GRAD for name in reached)])
        self._buckets.extend(reached)
        exchanges = [(b, names) for b in self._buckets.all if (names := [n for n in b.names if n in reached])]
        self.merged = (*(tuple(names) for _, names in exchanges), tuple(written))
        merged = {
            name: array for b, names in exchanges for name, array in self._merge(b, names, gradients, fetch)
        }
        if not self._merger.is_single:
            self._merge_buffers(shares, written)
        return {name: [merged[name]] if name in merged else results[name] for name in fetch}

    def _forward_and_backward(self, share: DeviceBatch) -> tuple[dict[str, Any], dict[str, Array]]:
        replica = self._replicas[share.device]
        self._order = []
        try:
            with on_device(replica.device):
                dropout.set_keys(replica.dropouts, share.keys)
                returned = self._loss(replica.model, *share.batch)
                found = named(returned)
                loss: Any = found.get("loss", returned)
                _check_loss(loss)
                _check_graph(loss.grad_fn, self._originals)
                trained = {name: p for name, p in replica.parameters.items() if p.requires_grad}
                factor = share.factor.to(loss.dtype)
                made = torch.autograd.grad(loss, list(trained.values()), factor, allow_unused=True)
                gradients = dict(zip(trained, made, strict=True))
                found["loss"] = loss.detach()
                complete = [name for name in dict.fromkeys(self._order) if gradients[name] is not None]
                return found, self._own({name: gradients[name] for name in complete}, found)
        finally:
            dropout.set_keys(replica.dropouts, None)

    def record_evaluation(
        self, function: Losses, shares: Sequence[DeviceBatch], fetch: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Record forward only, in evaluation mode."""
        results: dict[str, list[Any]] = {}
        for share in shares:
            replica = self._replicas[share.device]
            with private.no_grad(), on_device(replica.device), evaluating(replica.model):
                for name, value in named(function(replica.model, *share.batch)).items():
                    results.setdefault(name, []).append(value)
        for value in results.get("loss", ()):
            if isinstance(value, torch.Tensor) and value.dim():
                _refuse_loss(value)
        _check_fetch(fetch, list(results))
        self._written(shares, function)
        return {name: results[name] for name in fetch}

    def prepare_evaluation(self, function: Losses, shares: Sequence[DeviceBatch]) -> None:
        """Call the function once, which may make tensors that the model keeps."""
        for share in shares:
            replica = self._replicas[share.device]
            dropout.set_keys(replica.dropouts, None)  # those of a run that has failed
            with private.no_grad(), on_device(replica.device), evaluating(replica.model):
                _call_once(replica, function, share.batch, function)

    def prepare(self, shares: Sequence[DeviceBatch]) -> None:
        """Call the loss once, which may make tensors that the model keeps."""
        for share in shares:
            replica = self._replicas[share.device]
            with on_device(replica.device):
                dropout.set_keys(replica.dropouts, share.keys)
                _call_once(replica, self._loss, share.batch, "loss")

    def _own(self, gradients: dict[str, Any], results: dict[str, Any]) -> dict[str, Array]:
        """Return contiguous gradients, each in its own memory, since they are added up in place."""
        seen = {id(array.memory) for array in array_leaves(list(results.values()))}
        made: dict[str, Array] = {}
        for name, gradient in gradients.items():
            made[name] = gradient
            if gradient.layout is torch.strided:
                whole = (
                    gradient.is_contiguous() and gradient.numel() == gradient.memory.cell.layout[0].numel()
                )
                kept = gradient.memory.program is None  # such as a buffer that a custom backward returns
                if kept or not whole or id(gradient.memory) in seen:
                    made[name] = gradient.clone(memory_format=torch.contiguous_format)
                seen.add(id(gradient.memory))
        return made

    def _check_reached(self, gradients: Gradients) -> None:
        _check_same(gradients)
        reached = {name for each in gradients.values() for name in each}
        trained = [name for name, p in self._replicas[0].parameters.items() if p.requires_grad]
        missing = [name for name in trained if name not in reached and name not in self._warned]
        if missing:
            self._warned.update(missing)
            warn(
                f"no gradient reaches {', '.join(missing)}, so nothing updates it: if that is meant, "
                "requires_grad_(False) says so"
            )

    def _merge(
        self, bucket: Bucket, names: list[str], gradients: Gradients, fetch: Sequence[str]
    ) -> Iterator[tuple[str, Array]]:
        """Merge a bucket's gradients of these names, update, and yield the gradients to be fetched."""
        parts = {d: [own[name] for name in bucket.names if name in own] for d, own in gradients.items()}
        owner = self._replicas[bucket.owner].device
        merged = self._merger.merge(bucket, names, parts)
        with on_device(owner):
            for name, array in zip(names, merged[bucket.owner], strict=True):
                if name + GRAD in fetch:
                    yield name + GRAD, array.clone()  # type: ignore[misc]
        self._update(bucket, names, merged)

    def _update(self, bucket: Bucket, names: list[str], merged: dict[int, list[Array]]) -> None:
        for number, updates in bucket.updates.items():
            replica = self._replicas[number]
            parameters = [replica.parameters[name] for name in bucket.names]
            given = dict(zip(names, merged[number], strict=True))
            own = [array for array in given.values() if array.layout is torch.strided]
            places = [bucket.names.index(name) for name in names]
            operation(
                "update", partial(_update, updates.step, places, len(bucket.names)), replica.device,
                [*given.values(), *parameters], written=[*parameters, *own], lane="compute", phase="update",
            )  # fmt: skip
        self._broadcast(bucket)

    def _broadcast(self, bucket: Bucket) -> None:
        """Copy parameters that only the owner has updated to the other memories."""
        source = self._replicas[bucket.owner]
        done = {id(source.parameters[bucket.names[0]].memory)}
        for number, replica in enumerate(self._replicas):
            first = replica.parameters[bucket.names[0]].memory
            if number in bucket.updates or id(first) in done:
                continue
            done.add(id(first))
            targets = [replica.parameters[name] for name in bucket.names]
            collectives.broadcast([source.parameters[name] for name in bucket.names], targets, replica.device)

    def _written(self, shares: Sequence[DeviceBatch], evaluated: Losses | None = None) -> list[str]:
        """Return the names of the parameters without gradients that the recorded functions write.

        Devices without samples get the values of the others, where the functions have written them.

        Raises:
            UserError: A function writes a parameter that the devices share. Embeddings with max_norm may:
                they write a row once, however often they are called. Or it has made what no device merges.
        """
        written, what = placement.CONTEXT.program.written(), "loss" if evaluated is None else "function"
        key = "loss" if evaluated is None else evaluated
        for share in shares:
            check_made(self._replicas[share.device], written, what)
            check_undone(self._replicas[share.device], placement.CONTEXT.program, what, key)
        own = [self._replicas[share.device].parameters for share in shares]
        first = own[0]  # a loss may write some on a device with more samples only
        names = [name for name in first if any(id(each[name].memory) in written for each in own)]
        for name in names:
            memories = {id(replica.parameters[name].memory) for replica in self._replicas}
            if len(memories) < len(self._replicas) and name not in self._renormalized:
                raise UserError(
                    f"the {what} writes {name}, which the devices share with strategy='reduce', so each "
                    "would write it once: make it a buffer (register_buffer), or use strategy='all_reduce'"
                )
        without = [r for n, r in enumerate(self._replicas) if n not in {share.device for share in shares}]
        for replica in without if names and not self._renormalized else ():
            targets = [replica.parameters[name] for name in names]
            collectives.broadcast([first[name] for name in names], targets, replica.device)
        return [name for name in names if not first[name].requires_grad]

    def _written_buffers(self, shares: Sequence[DeviceBatch]) -> list[str]:
        """Return the names of the buffers that the loss writes on any device: a mean would round others."""
        written, buffers = placement.CONTEXT.program.written(), [r.buffers for r in self._replicas]
        return [
            name for name in buffers[0] if any(id(buffers[s.device][name].memory) in written for s in shares)
        ]

    def _merge_buffers(self, shares: Sequence[DeviceBatch], written: Sequence[str]) -> None:
        """Replace float buffers by means over samples, others by those of the first device with samples.

        Args:
            written: The buffers, and the parameters without gradients, that the loss has written.
        """
        variables = [replica.variables() for replica in self._replicas]
        floats = [name for name in written if variables[0][name].is_floating_point()]
        others = [name for name in written if name not in floats]
        first = shares[0].device
        if floats:
            parts = [[variables[s.device][name].detach() for name in floats] for s in shares]
            means = self._merger.mean(parts, [s.fraction for s in shares], self._replicas[first].device)
            for replica, own in zip(self._replicas, variables, strict=True):
                collectives.broadcast(means, [own[name] for name in floats], replica.device)
        for number, own in enumerate(variables) if others else ():
            if number != first:
                targets, sources = ([each[name] for name in others] for each in (own, variables[first]))
                collectives.broadcast(sources, targets, self._replicas[number].device)


class _restoring(private.Scope):  # noqa: N801
    """A scope whose end gives all parameters and buffers of a replica their present values and memories.

    A separate thread submits these copies, because a second Ctrl-C in this thread could skip some. It holds
    the replica's lock `restored` until then, in case an interrupt ends the wait for it.

    Args:
        written: Gets the names of what was changed inside.
    """

    def __init__(self, replica: ModelReplica, written: set[str]) -> None:
        self._replica = replica
        arrays = replica.variables()
        self._before = {name: array.detach().clone() for name, array in arrays.items()}
        self._places = {name: (array.data, array.memory.version) for name, array in arrays.items()}
        self._written = written
        self._errors: list[BaseException] = []
        self._done = threading.Lock()
        self._done.acquire()

    def calls(self) -> tuple[list[Any], list[Any]]:
        pending = partial(setattr, self._replica, "restored", self._done)
        wait = [self._done.acquire, self._done.release]
        return [], [partial(_thread.start_new_thread, self._restore, ()), pending, *wait]

    def _restore(self) -> None:
        try:
            with on_device(self._replica.device), torch.no_grad():
                for name, array in self._replica.variables().items():
                    place, version = self._places[name]
                    if array.memory is not place.memory:  # `x.data = y`; y may be a parameter
                        array.data = place
                        self._written.add(name)
                    elif array.memory.version != version:
                        self._written.add(name)
                for name, array in self._replica.variables().items():
                    array.copy_(self._before[name])
        except BaseException as error:
            self._errors.append(error)
        self._done.release()

    def check(self) -> None:
        """Raise the error of restoring, if any."""
        if self._errors:
            raise self._errors[0]


def _update(
    step: Callable[..., None], places: Sequence[int], n_parameters: int, *values: torch.Tensor
) -> None:
    """Call an optimizer with gradients at their parameters' places, and None at the others.

    Args:
        values: The gradients, and then the parameters.
    """
    gradients: list[Any] = [None] * n_parameters
    for place, value in zip(places, values, strict=False):
        gradients[place] = value
    step(gradients)


def _call_once(replica: ModelReplica, function: Losses, batch: Sequence[Array], key: Any) -> None:
    """Call a function of model and batch, and restore what it changes: the capture calls it again.

    Args:
        key: Of what the function has written, which a call that fails leaves to the next one.
    """
    restoring = _restoring(replica, replica.first_writes.setdefault(key, set()))
    with restoring:  # after an error, too: replicas must not differ
        function(replica.model, *(array.clone() for array in batch))
    restoring.check()


class evaluating(private.Scope):  # noqa: N801
    """A scope in which all modules are in evaluation mode."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.value = model

    def calls(self) -> tuple[list[Any], list[Any]]:
        restore = [
            partial(object.__setattr__, module, "training", module.training)
            for module in self.value.modules()
        ]
        return [self.value.eval], restore


def named(returned: Any) -> dict[str, Any]:
    """Return the results of a loss function by name; it returns a loss, results by name, or both."""
    results = {"loss": returned}
    if isinstance(returned, dict):
        results = dict(returned)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        if "loss" in returned[1]:
            raise UserError("the loss's results have 'loss', which is the name of the loss itself: rename it")
        results = {"loss": returned[0], **returned[1]}
    for name in results:
        if not isinstance(name, str):
            raise UserError(f"the loss's results have the name {name!r}, which is no text: rename it")
    return results


def _check_same(gradients: Gradients) -> None:
    """Raise UserError if the devices' gradients reach different parameters."""
    (first, wanted), *others = gradients.items()
    for number, own in others:
        only = sorted(own.keys() ^ wanted.keys())
        if only:
            raise UserError(
                f"gradients reach {', '.join(only)} on one of devices {first} and {number} only: "
                "let the loss use the same parameters for any number of samples"
            )


def _renormalized(replicas: Sequence[ModelReplica], merger: GradientMerger) -> set[str]:
    """Return the names of the weights of embeddings with max_norm, whose forward writes the rows it reads.

    Raises:
        UserError: There is one, and more than one copy of the weights.
    """
    found = set()
    for name, module in replicas[0].model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        weights = (replica.model.get_submodule(name).weight for replica in replicas)
        if merger.has_processes or len({id(weight.memory) for weight in weights}) > 1:  # type: ignore[union-attr]
            raise UserError(
                f"{name} has max_norm, so its forward writes the rows of its own samples, and the devices' "
                "copies would differ: use one device, or strategy='reduce' on CPU devices of one process"
            )
        found |= {n for n, p in replicas[0].parameters.items() if p is module.weight}
    return found


def _refuse_loss(loss: Any) -> NoReturn:
    what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    if isinstance(loss, torch.Tensor) and loss.is_complex():
        what = f"{loss.dtype}"
    raise UserError(f"the loss must be a real scalar, the mean over its samples, not {what}: loss.mean()?")


def _check_loss(loss: Any) -> None:
    """Raise UserError unless the loss is a scalar that depends on parameters."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or loss.is_complex():
        _refuse_loss(loss)
    if not torch.is_grad_enabled():
        raise UserError("run() trains, and torch.no_grad or inference_mode is on: call it outside of that")
    if not isinstance(loss, Array) or not loss.requires_grad:
        raise UserError("the loss depends on no parameter: is the model frozen, or its output detached?")


def _check_graph(node: Any, originals: Mapping[str, nn.Parameter]) -> None:
    """Raise UserError where gradients would be lost.

    torch.autograd.grad misses the parameters inside of a reentrant checkpoint. Nothing updates the
    parameters of the model that the replicas are copies of: a global name, or a closure, still means them.
    """
    names = {id(parameter): name for name, parameter in originals.items()}
    nodes, seen = [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise UserError(
                "the loss has a reentrant checkpoint, whose parameters would get no gradients: "
                "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            raise UserError(
                f"the loss's gradient reaches {name} of your own model, which no step updates: use the model "
                "that the loss is given (a lambda kept in a module means the original), or detach()"
            )
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]


def _check_fetch(fetch: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError if a name to fetch is unknown."""
    for name in fetch:
        if name not in known:
            there = ", ".join(each for each in known if not each.endswith(GRAD))
            raise UserError(
                f"fetch: there is no '{name}'{nearest(name, known)}: there are {there} and <parameter>{GRAD}"
            )
