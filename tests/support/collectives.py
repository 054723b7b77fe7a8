"""All collectives of a transport on a device of any kind, and what NumPy computes for them."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import simulated
import torch
from conftest import make_config
from simulated import Simulation

from lockstep.backends import Backend, backend_of
from lockstep.backends.host import HostBackend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.exchange import Span, proof, shard
from lockstep.memory import Block


@dataclass(frozen=True)
class Place:
    """The kind of device of all ranks: CPU or CUDA, shared or one device per rank, real or simulated.

    With kind 'mixed', ranks are on CUDA and on the CPU in turn.
    """

    kind: str
    device_each: bool
    simulation: Simulation | None

    def device(self, rank: int) -> str:
        if self.kind == "cpu" or (self.kind == "mixed" and rank % 2):
            return "cpu"
        return f"cuda:{rank if self.device_each else 0}"

    def kinds(self) -> list[str]:
        """Return the kinds of transport that exist here and have the same interface."""
        return {"cpu": ["auto"], "mixed": ["staged"]}.get(self.kind, ["p2p", "staged"])

    def start(self, rank: int) -> Backend:
        """Set up this rank's process. Call it first."""
        if self.simulation:
            simulated.use(self.simulation)
        proof.PROOF_BYTES = 4 << 20
        backend = backend_of(self.device(rank))
        backend.start_computing(make_config())
        return backend


def value_of(rank: int, number: int, n_elements: int) -> np.ndarray:
    random = np.random.default_rng([rank, number])
    return (random.standard_normal(n_elements) * 10.0 ** random.integers(-9, 9)).astype(np.float32)


def write(backend: Backend, block: Block, values: np.ndarray) -> None:
    """Write values into an arena, on a device asynchronously in its stream."""
    if isinstance(backend, HostBackend):
        block.tensor(torch.float32, (len(values),)).copy_(torch.from_numpy(values))
    else:
        backend.memory.driver.memcpy_htod_async(block.pointer, values, backend.stream)  # type: ignore[attr-defined]


def read(backend: Backend, block: Block, values: np.ndarray) -> None:
    """Read an arena into `values`, on a device asynchronously in its stream."""
    if isinstance(backend, HostBackend):
        values[:] = block.tensor(torch.float32, (len(values),)).numpy()
    else:
        backend.memory.driver.memcpy_dtoh_async(values, block.pointer, backend.stream)  # type: ignore[attr-defined]


N_ELEMENTS = 16 * 41
# Name, span, and operation or source. Spans begin at multiples of the alignment and have odd lengths.
COLLECTIVES: list[tuple[str, Span, Any]] = [
    ("all_reduce", (0, N_ELEMENTS), "mean"),
    ("all_reduce", (16, 16 * 30 + 5), "sum"),
    ("all_reduce", (32, 32 + 3), "max"),
    ("all_reduce", (16 * 7, 16 * 7 + 199), "min"),
    ("all_reduce", (48, N_ELEMENTS - 1), "prod"),
    ("reduce_scatter", (16, 16 * 33 + 1), "sum"),
    ("reduce_scatter", (0, N_ELEMENTS), "mean"),
    ("all_gather", (16 * 3, 16 * 39 + 11), None),
    ("all_gather", (0, 17), None),
    ("broadcast", (16 * 5, 16 * 21 + 2), -1),  # from the last rank
    ("broadcast", (0, N_ELEMENTS), 0),
]


def collect(rank: int, pipes: dict[int, Pipe], place: Place, kind: str) -> list[bytes]:
    """Run every collective on the result of the previous one; return the whole block after each."""
    backend, group, n_ranks = place.start(rank), Group.on_one_host(rank, pipes), len(pipes) + 1
    block = backend.memory.allocate(4 * N_ELEMENTS, "a test")
    arena = block.tensor(torch.float32, (N_ELEMENTS,))
    transport, _ = backend.open_transport(kind, block, arena, group)
    values = value_of(rank, 0, N_ELEMENTS)  # must outlive the asynchronous copy
    write(backend, block, values)
    results = np.empty((len(COLLECTIVES), N_ELEMENTS), np.float32)
    for (name, span, argument), result in zip(COLLECTIVES, results, strict=True):
        if name == "broadcast":
            transport.broadcast(span, argument % n_ranks)
        elif name == "all_gather":
            transport.all_gather(span)
        else:
            getattr(transport, name)(span, argument)
        read(backend, block, result)
    transport.close()
    block.close()
    return [result.tobytes() for result in results]


def expected_collectives(n_ranks: int) -> list[list[bytes]]:
    """Compute with NumPy what each rank's block contains after each collective."""
    blocks = [value_of(rank, 0, N_ELEMENTS) for rank in range(n_ranks)]
    results: list[list[bytes]] = [[] for _ in blocks]
    combine = {"mean": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    for name, span, argument in COLLECTIVES:
        before = [block.copy() for block in blocks]
        if "reduce" in name:
            total = functools.reduce(combine[argument], before)
            total = total / np.float32(n_ranks) if argument == "mean" else total
        for rank, block in enumerate(blocks):
            for owner in range(n_ranks):
                part = slice(*shard(span, owner, n_ranks))
                if name == "all_reduce" or (name == "reduce_scatter" and owner == rank):
                    block[part] = total[part]
                elif name == "all_gather":
                    block[part] = before[owner][part]
                elif name == "broadcast":
                    block[part] = before[argument][part]
            results[rank].append(block.tobytes())
    return results
