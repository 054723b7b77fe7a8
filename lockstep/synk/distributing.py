"""Making functions, and bringing them to the ranks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.synk import carrying
from lockstep.synk.functions import Function, RowNumbers
from lockstep.synk.programs import Asked, Program
from lockstep.synk.session import current_team
from lockstep.synk.shareds import Adopt, Shared, make_places

if TYPE_CHECKING:
    from lockstep.synk.team import Team


def function(
    inputs: Any,
    outputs: Any = None,
    bcast_inputs: Any = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    **kwargs: Any,
) -> Function:
    """A function that runs on all ranks at once.

    Of a graph of PyTensor, as pytensor.function makes one: inputs is a list of variables, whose values are
    divided by rows. outputs: a variable or (variable, mode), or a list of those. bcast_inputs: variables
    whose values go whole to all. updates: pairs, triples with a mode, or a dict. sliceable_shareds: shared
    variables whose rows batch_s and num_slices choose. kwargs go to pytensor.function.

    Of a callable that computes with torch: inputs is the callable, and its parameters are the inputs, as
    tensors. outputs: the mode of what it returns, a list of modes, or None. bcast_inputs: names of
    parameters. updates: shared tensors that it changes, or (shared, mode). sliceable_shareds: as above.

    Raises RuntimeError before fork(), TypeError and ValueError for what docs/synk.md lists.
    """
    team = current_team("function()")
    number = team.n_functions
    name = str(kwargs.pop("name", None) or f"function{number}")
    build = _build_callable if callable(inputs) else _build_graph
    program = build(
        team, Asked(name, inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kwargs)
    )
    if team.row_numbers is None:
        team.row_numbers = RowNumbers(team)
    team.here.programs[number] = program
    team.n_functions += 1
    made = Function(team, number, program, team.row_numbers)
    team.functions.append(made)
    return made


def distribute() -> None:
    """Brings functions, and the shared variables that they use, to all ranks. May be called again for later
    ones.

    Variables start with this process's values everywhere; random streams of each rank become its own.

    Raises TypeError for a function that can't be pickled, naming what of it, and what compiling one raises on
    a rank. Such functions are passed over the next time; make them anew. Objects that several functions hold
    (an optimizer) stay one object on the ranks when the functions go over together.
    """
    team = current_team("distribute()")
    with team.lock:
        fresh = [made for made in team.functions if not made.distributed]
        kinds = {team.here.programs[made.number].kind for made in fresh}
        uncarried = [s for number, s in team.here.shareds.items() if number not in team.known.carried]
        new = [shared for shared in uncarried if shared.kind in kinds]
        carry = _pack(team, fresh, new)
        adopt = _replicate(team, [shared for shared in new if shared.is_array])
        try:
            team.ask("distribute()", carry, adopt)
        except Exception:
            team.functions = [made for made in team.functions if made not in fresh]
            raise
        finally:
            team.release(carry.pickles.block)
        for shared in new:
            shared.become_own(team.rank)
        team.known.carried.update(shared.number for shared in new)
        for made in fresh:
            made.distributed = True
        team.distributed = True
        team.threads.limit()


def _build_graph(team: "Team", asked: Asked) -> Program:
    if team.here.gpu is not None:
        raise UserError(
            f"{asked.name}: PyTensor has no code for GPUs, and the ranks are on them: use a torch callable"
        )
    from lockstep.synk.programs import graph_input  # PyTensor is imported when it is needed first

    return graph_input.build(team.known, asked)


def _build_callable(team: "Team", asked: Asked) -> Program:
    from lockstep.synk.programs import callables  # so is torch

    return callables.build(team.known, team.here, asked)


def _pack(team: "Team", fresh: list[Function], new: list[Shared]) -> carrying.Carry:
    begun: list[Function] = []
    try:
        return carrying.pack(team, _pieces(team, fresh, new, begun))
    except TypeError:
        team.functions.remove(begun[-1])
        raise


def _pieces(
    team: "Team", fresh: list[Function], new: list[Shared], begun: list[Function]
) -> Iterator[tuple[str, Any]]:
    """What makes the functions on a worker; new variables go with the first function of their kind."""
    for made in fresh:
        begun.append(made)
        program = team.here.programs[made.number]
        mine = [shared for shared in new if shared.kind == program.kind]
        new = [shared for shared in new if shared not in mine]
        yield from program.pieces(made.number, mine)


def _replicate(team: "Team", shareds: list[Shared]) -> Adopt:
    """Gives variables a place and all ranks this process's value there."""
    values = [shared.get() for shared in shareds]
    homeless = [shared for shared in shareds if shared.place is None]
    if homeless:
        made = make_places(team, [shared.get().nbytes for shared in homeless], "shared variables")
        for shared, place in zip(homeless, made, strict=True):
            shared.place = place
    places = [shared.place for shared in shareds if shared.place is not None]
    for place, value in zip(places, values, strict=True):
        for rank in range(team.size):
            team.here.blocks.array(place.span(rank, value.dtype, value.shape))[...] = value
    shapes = tuple((value.shape,) * team.size for value in values)
    return Adopt(tuple(shared.number for shared in shareds), tuple(places), shapes)
