"""Chains of a program's operations are one for the engine, with the same effects."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import flow
from lockstep.flow.devices import Cpu
from lockstep.flow.program import Node, chains

NODES = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 4)), st.lists(st.integers(1, 6)), st.booleans()),
    max_size=25,
)


def reachable(nodes: list[Node], start: int, by_need: bool) -> set[int]:
    """Return the operations before it."""
    found: set[int] = set()
    todo = [start]
    while todo:
        node = nodes[todo.pop()]
        new = {*node.needs, *(() if by_need else node.follows)} - found
        found |= new
        todo += new
    return found


@settings(deadline=None, max_examples=150)
@given(NODES)
def test_a_chain_begins_and_ends_for_others_as_its_operations_would(rows: list[tuple[object, ...]]) -> None:
    nodes = []
    for number, (lane, needs, follows, opens) in enumerate(rows):
        before = [sorted({number - back for back in backs if back <= number}) for backs in (needs, follows)]
        nodes.append(Node(lane, before[0], [n for n in before[1] if n not in before[0]], opens, False))
    made = chains(nodes)
    assert sorted(n for chain in made for n in chain) == list(range(len(nodes)))
    for chain in made:
        assert chain == [n for n in range(chain[0], chain[-1] + 1) if nodes[n].lane == nodes[chain[0]].lane]
        first, last = chain[0], chain[-1]
        for before, number in pairwise(chain):
            assert before in nodes[number].needs and not nodes[number].opens
            assert {*nodes[number].needs} - {*chain} <= reachable(nodes, first, True)
            assert {*nodes[number].follows} - {*chain} <= reachable(nodes, first, False)
        for number in {*range(len(nodes))} - {*chain}:
            if {*nodes[number].needs} & {*chain}:
                assert last in reachable(nodes, number, True)
            if {*nodes[number].follows} & {*chain}:
                assert last in reachable(nodes, number, False)


def test_a_straight_line_is_one_chain_and_a_branch_ends_it() -> None:
    line = [Node("a", [n - 1] if n else [], [], False, False) for n in range(5)]
    assert chains(line) == [[0, 1, 2, 3, 4]]
    assert chains([*line, Node("b", [2], [], False, False)]) == [[0, 1, 2], [3, 4], [5]]
    line[2] = line[2]._replace(closes=True)
    assert chains(line) == [[0, 1, 2], [3, 4]]


@pytest.fixture
def devices() -> Iterator[list[Cpu]]:
    made = flow.cpus(1)
    with flow.Engine(made):
        yield made


def test_a_failure_inside_a_chain_names_its_operation_and_spares_others(devices: list[Cpu]) -> None:
    state = flow.array(torch.eye(2))

    def step(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        other = x * 2
        return other, (state @ x).index_select(0, row).exp()

    program = flow.capture(step, torch.eye(2), torch.tensor([1]))
    doubled, found = program(torch.eye(2), torch.tensor([1]))
    assert torch.equal(doubled, 2 * torch.eye(2)) and torch.equal(found, torch.eye(2)[1:].exp())
    with flow.recording() as trace:
        program(torch.eye(2), torch.tensor([0]))
        flow.wait_all()
    assert [o.name for o in trace.operations if o.phase == "forward"] == ["mul", "mm", "index_select", "exp"]
    with pytest.raises(flow.OperationError, match=r"index_select on cpu, recorded at .*test_flow_chains.py:"):
        program(torch.eye(2), torch.tensor([7]))
    assert torch.equal(program(torch.eye(2), torch.tensor([1]))[1], found)


def test_a_check_of_values_raises_from_the_program(devices: list[Cpu]) -> None:
    program = flow.capture(torch.linalg.cholesky, torch.eye(2))
    assert torch.equal(program(4 * torch.eye(2)), 2 * torch.eye(2))
    with pytest.raises(flow.OperationError, match="positive-definite"):
        program(-torch.eye(2))


def test_autocast_is_captured_with_backward(devices: list[Cpu]) -> None:
    """The weights that layers see are copies then, which autograd keeps for backward."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = torch.randn(6, 4)

    def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    wanted = gradients(plain, x)
    with flow.device(devices[0]):
        program = flow.capture(partial(gradients, flow.arrays(plain)), x)
    assert all(torch.equal(value, found) for value, found in zip(wanted, program(x), strict=True))


def test_what_a_chain_uses_last_is_kept_for_what_is_submitted_behind_it() -> None:
    """A chain on the first device continues behind an operation of the second with the same input."""
    with flow.Engine(flow.cpus(2)) as engine:
        first, second = engine.devices

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with flow.device(first):
                base = x + 1
                other = (base * 3).exp()
            with flow.device(second):
                seen = base * 2
            with flow.device(first):
                return seen, other * base

        program = flow.capture(step, torch.ones(3))
        for _ in range(3):
            seen, product = program(torch.ones(3))
            assert seen.tolist() == [4.0] * 3 and torch.equal(product, torch.full((3,), 6.0).exp() * 2)
