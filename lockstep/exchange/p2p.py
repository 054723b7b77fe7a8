"""Averaging on GPUs: a kernel reads and writes the peers' arenas through pointers that CUDA IPC has opened.

No host waits for a device. Each rank has two interprocess events, recorded in its compute stream: *updated*
after its update, *averaged* after its part of the averaging. Every rank's stream waits for every other's. A
wait refers to the last record that was issued before it, so the trainers' meetings put the calls in order:
records before a meeting, waits after it.

All is done in the compute stream itself. Another stream would gain nothing: the next forward pass needs the
mean. The compute stream is one of PyCUDA's, which torch can be made to use (torch.cuda.ExternalStream).

This file has run on the simulated driver of the tests only, not on a GPU yet.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep import kernels
from lockstep.exchange import SHARD_ALIGNMENT, Exchange, shard
from lockstep.peers import Peers

MOST_RANKS = 16  # as in kernels/average.cu
_THREADS = 256
_FLOATS = 4  # that one thread takes


@dataclass(frozen=True)
class EventHandles:
    """What the ranks send each other once: how to open their two events."""

    updated: bytes
    averaged: bytes


class PeerExchange(Exchange):
    """`arenas`: device pointers to every rank's arena, in rank order, each of n_elements float32.

    driver: pycuda.driver, with the device's context current. stream: the PyCUDA stream in which this rank
    computes. peers: the pipes on which events are exchanged.
    """

    def __init__(self, driver: Any, stream: Any, arenas: list[int], n_elements: int, peers: Peers) -> None:
        self._stream = stream
        assert len(arenas) == peers.n_trainers <= MOST_RANKS and n_elements % SHARD_ALIGNMENT == 0
        flags = driver.event_flags.INTERPROCESS | driver.event_flags.DISABLE_TIMING
        self._updated, self._averaged = driver.Event(flags), driver.Event(flags)
        self._peers_updated, self._peers_averaged = self._open_events(driver, peers)
        self._kernel = kernels.load(driver, "average").get_function("average")
        first, last = (element // _FLOATS for element in shard(n_elements, peers.rank, len(arenas)))
        pointers = np.zeros(MOST_RANKS, np.uint64)
        pointers[: len(arenas)] = arenas
        self._arguments = (pointers, np.int32(len(arenas)), np.uint64(first), np.uint64(last))
        processors = driver.Context.get_device().get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        # Enough threads to fill the device; each goes round until the shard is done.
        self._blocks = max(1, min(-(-(last - first) // _THREADS), 8 * processors))

    def updated(self) -> None:
        self._updated.record(self._stream)

    def average(self) -> None:
        for event in self._peers_updated:
            self._stream.wait_for_event(event)
        shape = {"block": (_THREADS, 1, 1), "grid": (self._blocks, 1), "stream": self._stream}
        self._kernel(*self._arguments, **shape)
        self._averaged.record(self._stream)

    def averaged(self) -> None:
        for event in self._peers_averaged:
            self._stream.wait_for_event(event)

    def _open_events(self, driver: Any, peers: Peers) -> tuple[list[Any], list[Any]]:
        handles = EventHandles(bytes(self._updated.ipc_handle()), bytes(self._averaged.ipc_handle()))
        for pipe in peers.pipes.values():
            pipe.send(handles)
        theirs = [pipe.receive(EventHandles, "its events") for pipe in peers.pipes.values()]

        def opened(handle: bytes) -> Any:
            return driver.Event.from_ipc_handle(bytearray(handle))

        return [opened(each.updated) for each in theirs], [opened(each.averaged) for each in theirs]
