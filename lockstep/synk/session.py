"""The session of this process, from fork() over function() and distribute() to close()."""

import atexit
import math
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any

from lockstep.errors import UserError
from lockstep.synk import delivery
from lockstep.synk.bindings import Bindings
from lockstep.synk.context import is_worker
from lockstep.synk.functions import Function, RowNumbers
from lockstep.synk.interrupts import defer_signals
from lockstep.synk.programs import FunctionRequest, RankProgram
from lockstep.synk.shareds import Shared, receive_attributes
from lockstep.synk.slots import UseSlots, make_slots, release_unused
from lockstep.synk.team import Team
from lockstep.synk.workers import TeamOptions
from lockstep.threads import MOST_THREADS

_ON_CPUS = "without use_gpu and devices, ranks compute on CPUs"


@dataclass
class _Session:
    """A team, and its functions that are not distributed yet.

    A distributed function belongs to the program alone: its inputs' memory is released with it.
    """

    team: Team
    row_numbers: RowNumbers
    new_functions: list[Function] = field(default_factory=list)


class _Process:
    """The state of this process."""

    session: _Session | None = None
    starting = threading.RLock()  # held by the thread that starts a team


def _release_in_child() -> None:
    _Process.starting = threading.RLock()  # a thread that the child lacks may hold the parent's


os.register_at_fork(after_in_child=_release_in_child)


def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int | None = None,
    max_dim: int | None = None,
    devices: Sequence[str] | None = None,
    threads: int | None = None,
    timeout: float = 300,
) -> int:
    """Start the other ranks and return the number of ranks.

    A forked child has no ranks until it calls fork() itself.

    Args:
        n_parallel: Number of ranks, this process included. Default: $LOCKSTEP_SYNK_PARALLEL, else the number
            of devices, else the number of cores.
        use_gpu: Put the ranks on all visible GPUs, for torch callables.
        master_rank: Rank of this process.
        profile_workers: Each worker writes synk_worker_<rank>.prof.
        max_n_var, max_dim: Limits of Synkhronos; accepted and ignored.
        devices: 'cpu' or 'cuda:<n>' for each rank.
        threads: Number of BLAS and OpenMP threads of each rank. Default: cores divided by ranks.
        timeout: Seconds that this process waits for a rank after it has done its own part.

    Raises:
        RuntimeError: The ranks already exist, or this process is one of them.
        ValueError: An argument is out of range.
    """
    _check_no_team()
    gpus = _choose_devices(use_gpu, devices)
    size = _choose_size(n_parallel, devices or gpus)
    if not 0 <= _as_integer("master_rank", master_rank) < size:
        raise ValueError(f"fork(): master_rank={master_rank} is out of range: ranks are 0 to {size - 1}")
    if not (isinstance(timeout, Real) and 0 < timeout < math.inf):
        raise ValueError(f"fork(): timeout={timeout} is not a number of seconds. For no limit give 1e9")
    n_threads = max(1, _count_cores() // size) if threads is None else _as_integer("threads", threads)
    if not 1 <= n_threads <= MOST_THREADS:
        raise ValueError(f"fork(): threads={threads} is not from 1 to {MOST_THREADS}")
    options = TeamOptions(size, master_rank, n_threads, profile_workers, timeout, gpus)
    team = Team(options)
    with defer_signals(team.kill), _Process.starting:
        _check_no_team()  # another thread may have started one
        team.start(options)
        _Process.session = _Session(team, RowNumbers(team))
    return size


def _check_no_team() -> None:
    if is_worker():  # a module that ranks import would start teams without an end
        raise RuntimeError(
            "fork(): this process is a rank already. A module whose functions or classes ranks use can't "
            "call fork() when it is imported: define these in another module, or call fork() in the program"
        )
    session = _Process.session
    if session is not None and session.team.is_mine and not session.team.closed:
        raise RuntimeError("fork(): there is a team already; close() ends it")


def close() -> None:
    """End the other ranks and restore this process's number of threads. Does nothing without a team."""
    session = _Process.session
    if session is not None:
        session.team.close()
        with _Process.starting:  # another thread may have started the next team
            if session.team.closed and _Process.session is session:
                _Process.session = None  # what its functions hold can be collected


def current_team(what: str) -> Team:
    """Return the team.

    Raises:
        RuntimeError: fork() was not called.
        RankLost: A rank is lost.
    """
    return _current_session(what).team


def _current_session(what: str) -> _Session:
    session = _Process.session
    if session is None or (session.team.closed and session.team.is_mine):
        raise RuntimeError(f"{what}: call fork() first")
    session.team.check(what)
    return session


def distributed_team(what: str) -> Team:
    """Return the team; raise RuntimeError if distribute() was not called."""
    team = current_team(what)
    if not team.distributed:
        raise RuntimeError(f"{what}: call distribute() first")
    return team


def _choose_size(n_parallel: int | None, devices: Sequence[str] | None) -> int:
    from_environment = os.environ.get("LOCKSTEP_SYNK_PARALLEL")
    if n_parallel is None and from_environment:
        if not from_environment.isdecimal():
            raise ValueError(f"LOCKSTEP_SYNK_PARALLEL={from_environment!r} is not a number of ranks")
        n_parallel = int(from_environment)
    if n_parallel is None:
        n_parallel = len(devices) if devices else _count_cores()
    size = _as_integer("n_parallel", n_parallel)
    if not 1 <= size <= MOST_THREADS:
        raise ValueError(f"fork(): the number of ranks is {size}. Give 1 to {MOST_THREADS}")
    if devices and len(devices) != size:
        raise ValueError(f"fork(): {len(devices)} devices for {size} ranks")
    return size


def _as_integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"fork(): {name}={value!r} is not an integer") from None


def _count_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _choose_devices(use_gpu: bool | None, devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return the GPU of each rank, or an empty tuple for CPUs."""
    if devices is None and not use_gpu:
        return ()
    from lockstep.backends import devices as known  # imported here, since workers do not need it

    if devices is None:
        names, reason = known.choose(_ON_CPUS)
        if not known.on_gpus(names):
            raise UserError(f"fork(): use_gpu, but {reason}")
    else:
        if isinstance(devices, str):
            raise UserError(f"fork(): devices={devices!r} has to be a list of one device for each rank")
        names = known.normalise(tuple(devices))
    if known.are_mixed(names):
        raise UserError(f"fork(): ranks are on CPUs or on GPUs, not on both: {', '.join(names)}")
    if use_gpu and not known.on_gpus(names):
        raise UserError(f"fork(): use_gpu, but devices are CPUs: {', '.join(names)}. Leave one of them out")
    known.check(names, _ON_CPUS)
    return names if known.on_gpus(names) else ()


def function(
    inputs: Any,
    outputs: Any = None,
    bcast_inputs: Any = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    **kwargs: Any,
) -> Function:
    """Return a function that runs on all ranks at once, made of a PyTensor graph or a torch callable.

    Args:
        inputs: Graph: a list of variables, whose values are divided by rows. Callable: the callable itself,
            whose parameters are the inputs, as tensors.
        outputs: Graph: a variable or (variable, mode), or a list of them. Callable: the mode of its result,
            a list of modes, or None.
        bcast_inputs: Inputs that every rank receives whole. Graph: variables. Callable: parameter names.
        updates: Graph: pairs, triples with a mode, or a dict. Callable: shared tensors that it changes, or
            (shared, mode).
        givens: Graph: as in pytensor.function.
        sliceable_shareds: Shared variables whose rows batch_s and num_slices select.
        kwargs: Graph: further arguments of pytensor.function.

    Raises:
        RuntimeError: fork() was not called.
        TypeError, ValueError: An argument is not as described.
    """
    session = _current_session("function()")
    team = session.team
    with team.lock:  # not exclusive_call: Ctrl-C need not wait for a compiler
        number = next(team.numbers)
        name = str(kwargs.pop("name", None) or f"function{len(team.context.programs)}")
        build = _build_callable if callable(inputs) else _build_graph
        request = FunctionRequest(
            name=name,
            inputs=inputs,
            outputs=outputs,
            bcast_inputs=bcast_inputs,
            updates=updates,
            givens=givens,
            sliceable_shareds=sliceable_shareds,
            options=kwargs,
        )
        program = build(team, request)
        team.context.programs[number] = program
        created = Function(team, number, program, session.row_numbers)
        session.new_functions.append(created)
    return created


def distribute() -> None:
    """Send new functions, and the shared variables that they use, to all ranks.

    It may be called again for later functions. Variables start with this process's values on all ranks, and
    each rank receives random streams of its own. An object that several functions hold (an optimizer) remains
    one object on the ranks if the functions are distributed together.

    Raises:
        ValueError: A module was cast to another dtype after share().
        TypeError: A function cannot be pickled; the message names the part. Create the function again, since
            the next distribute() skips it.
        Exception: An error of compiling a function on a rank.
    """
    session = _current_session("distribute()")
    team = session.team
    with team.exclusive_call("distribute()"):
        team.registry.sync_objects()
        new_functions = list(session.new_functions)
        kinds = {team.context.programs[new_function.number].kind for new_function in new_functions}
        known = team.registry.delivered
        new = [s for s in team.context.shareds.values() if s.number not in known and s.kind in kinds]
        replicated = _replicate(team, [shared for shared in new if shared.is_array])
        delivered, copies, imports = _pack(session, new_functions, new)
        try:
            loaded = team.ask("distribute()", delivered, replicated)[0]
        finally:
            session.new_functions.clear()  # also after an error: the next call would send them again
            team.release(delivered.pickles.block)
        delivery.note_imports(team, chain.from_iterable(loaded))
        for shared in new:
            shared.use_rank_stream(team.rank)
        team.registry.delivered.update(shared.number for shared in new)
        found = Bindings(lambda parameter: team.registry.label(parameter) is not None)
        for function in new_functions:
            function.mark_distributed(delivered.settings, copies, imports, found)
        team.distributed = True
        team.threads.limit()


def _build_graph(team: Team, request: FunctionRequest) -> RankProgram:
    if team.context.gpu is not None:
        raise UserError(
            f"{request.name}: PyTensor has no code for GPUs, and the ranks are on them: use a torch callable"
        )
    from lockstep.synk import graphs  # PyTensor is imported when it is needed first

    return graphs.build(team.registry, request)


def _build_callable(team: Team, request: FunctionRequest) -> RankProgram:
    from lockstep.synk import callables  # so is torch

    return callables.build(team.registry, team.context, request)


def _pack(
    session: _Session, new_functions: list[Function], new: list[Shared]
) -> tuple[delivery.DeliverPrograms, Mapping[int, Any], delivery.Imports]:
    started: list[Function] = []
    try:
        return delivery.pack(session.team, _pieces(session.team, new_functions, new, started))
    except TypeError:
        session.new_functions.remove(started[-1])
        raise


def _pieces(
    team: Team, new_functions: list[Function], new: list[Shared], started: list[Function]
) -> Iterator[tuple[str, Any]]:
    """Yield what a worker builds the functions from; new variables precede their first function."""
    left, programs = new, team.context.programs
    # Graphs first, since callables may read the variables that come with them.
    for function in sorted(new_functions, key=lambda each: programs[each.number].kind == "callable"):
        started.append(function)
        program = programs[function.number]
        own = [shared for shared in left if shared.kind == program.kind]
        left = [shared for shared in left if shared not in own]
        yield from program.pieces(function.number, own)
    if attributes := [pair for shared in new for pair in shared.attributes()]:
        what = "an attribute of a shared tensor"
        yield from ((what, receive_attributes), (what, attributes))


def _replicate(team: Team, shareds: list[Shared]) -> UseSlots:
    """Give variables slots, and write this process's values into the slots of all ranks."""
    values, previous = [shared.get() for shared in shareds], [shared.slot for shared in shareds]
    without_slot = [
        shared for shared in shareds if shared.slot is None or shared.slot.n_bytes < shared.n_bytes
    ]
    if without_slot:
        new_slots = make_slots(team, [shared.get().nbytes for shared in without_slot], "shared variables")
        for shared, slot in zip(without_slot, new_slots, strict=True):
            shared.slot = slot
    slots = [shared.slot for shared in shareds if shared.slot is not None]
    for slot, value in zip(slots, values, strict=True):
        for rank in range(team.size):
            team.context.blocks.array(slot.location(rank, value.dtype, value.shape))[...] = value
    release_unused(team, shareds, previous)
    shapes = tuple((value.shape,) * team.size for value in values)
    missing = tuple(shared.parts_without_value() for shared in shareds)
    return UseSlots(tuple(shared.number for shared in shareds), tuple(slots), shapes, missing)


atexit.register(close)
