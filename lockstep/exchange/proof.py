"""A test, before training, that devices really reach each other's memory.

`cuDeviceCanAccessPeer` says yes on machines where transfers are lost or garbled (an IOMMU that is on, PCIe
access control, broken drivers). Networks then learn nonsense without any error. So every ordered pair of
ranks averages random data through the path that training uses: memory and events opened by CUDA IPC, read
and written by the reduction kernel after the other's event. Each side compares its own memory with the
expected values, bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.kernels.fold import ReduceKernel
from lockstep.memory.cuda import CudaBlock, CudaHandle, CudaMemory, EventHandles

PROOF_BYTES = 64 << 20  # each way, for each pair
IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")
_SOURCE, _TARGET = 0, 1


@dataclass(frozen=True)
class Pair:
    """The result of one ordered pair: `rank` has read and written the memory of `peer`.

    problem: Empty if there is none.
    """

    rank: int
    peer: int
    gb_per_second: float  # read and written over the link, added up
    problem: str = ""


def prove(memory: CudaMemory, stream: Any, group: Group) -> list[Pair]:
    """Test every ordered pair. All ranks call it at once.

    Args:
        memory: Of this rank's device.
        stream: In which this rank computes.
        group: The ranks.

    Returns:
        The same list on all ranks, by rank and peer. It has only the failed pairs, and no data are sent, if
        the driver denies access between two devices or a handle can't be opened.
    """
    denied = [pair for pairs in group.all_gather("peer access", _denied(memory, group)) for pair in pairs]
    if denied or not group.pipes:
        return denied
    proof = _Proof(memory, stream, group, PROOF_BYTES // 4)
    try:
        unopened = [
            pair for pairs in group.all_gather("what could be opened", proof.open()) for pair in pairs
        ]
        return unopened or proof.run()
    finally:
        proof.close()


def iommu() -> str:
    """Return a sentence about the machine's IOMMU, the usual reason for peer access that fails."""
    n_groups = len(list(IOMMU_GROUPS.iterdir())) if IOMMU_GROUPS.is_dir() else 0
    if not n_groups:
        return "no IOMMU groups"
    return f"{n_groups} IOMMU groups: with an IOMMU, peer access over PCIe does not work on bare metal"


def _denied(memory: CudaMemory, group: Group) -> list[Pair]:
    devices = group.all_gather("devices", memory.pci_bus_id)
    failed = []
    for rank in group.pipes:
        if devices[rank] == memory.pci_bus_id:
            continue
        try:
            card = memory.driver.Device(devices[rank])
        except memory.driver.Error:
            problem = f"{memory} does not see {devices[rank]}: CUDA_VISIBLE_DEVICES must be the same in all"
        else:
            mine = memory.driver.Context.get_device()
            problem = "" if mine.can_access_peer(card) else f"{memory} can't access {devices[rank]}"
        if problem:
            failed.append(Pair(group.world.rank, rank, 0.0, problem))
    return failed


class _Proof:
    """The arrays of a test: each rank averages its *source*, and one peer a round averages its *target*.

    In round k, rank r averages its source and the target of rank r + k.
    """

    def __init__(self, memory: CudaMemory, stream: Any, group: Group, n_elements: int) -> None:
        self._memory, self._stream, self._group, self._n_elements = memory, stream, group, n_elements
        self._kernel = ReduceKernel(memory, stream)
        self._source = memory.allocate(4 * n_elements, "proving peer access")
        self._target = memory.allocate(4 * n_elements, "proving peer access")
        self._opened: dict[int, CudaBlock] = {}
        self._filled: Any = None
        self._peers_filled: dict[int, Any] = {}

    def open(self) -> list[Pair]:
        """Open targets and events of the others, and return the pairs for which CUDA IPC fails."""
        offers = self._group.all_gather("what to open", self._offer())
        me, failed = self._group.world.rank, []
        for rank in self._group.pipes:
            handle, events, problem = offers[rank]
            try:
                if handle is not None and events is not None:
                    self._opened[rank] = self._memory.open(handle)
                    (self._peers_filled[rank],) = self._memory.open_events(events)
            except UserError as error:
                problem = f"{self._memory} can't open memory of trainer {rank} by CUDA IPC: {error}"
            if problem:
                failed.append(Pair(me, rank, 0.0, problem))
        return failed

    def _offer(self) -> tuple[CudaHandle | None, EventHandles | None, str]:
        """Return what the others open: the target and an event recorded when it is filled; or a problem."""
        try:
            (self._filled,) = self._memory.shared_events(1)
            return self._target.handle(), self._memory.event_handles([self._filled]), ""
        except UserError as error:
            return None, None, str(error)

    def run(self) -> list[Pair]:
        """Test all ordered pairs, and return them by rank and peer."""
        pairs = []
        for distance in range(1, self._group.world.size):
            pairs += self._round(distance)
        return sorted(pairs, key=lambda pair: (pair.rank, pair.peer))

    def close(self) -> None:
        """Free the memory, when no rank uses it any more."""
        self._stream.synchronize()
        for block in self._opened.values():
            block.close()
        self._peers_filled.clear()  # before their owners destroy them
        self._group.all_gather("the proof is over")
        self._source.close()
        self._target.close()

    def _round(self, distance: int) -> list[Pair]:
        """Test one pair per rank. The rank that owns the memory judges what was written there."""
        rank, n_ranks = self._group.world.rank, self._group.world.size
        peer, writer = (rank + distance) % n_ranks, (rank - distance) % n_ranks
        self._fill(self._source, rank, distance, _SOURCE)
        self._fill(self._target, rank, distance, _TARGET)
        self._filled.record(self._stream)
        self._group.all_gather(f"filled for round {distance}")
        seconds = self._average(peer)
        self._group.all_gather(f"averaged in round {distance}")
        read = self._compare(self._source, rank, peer, distance)
        written = self._compare(self._target, writer, rank, distance)
        results = self._group.all_gather(f"compared in round {distance}", (seconds, read, written))
        return [self._judge(first, (first + distance) % n_ranks, results) for first in range(n_ranks)]

    def _average(self, peer: int) -> float:
        """Return the seconds that the device takes; 64 MiB cross the link in each direction."""
        begin, end = self._memory.driver.Event(), self._memory.driver.Event()
        self._stream.wait_for_event(self._peers_filled[peer])
        begin.record(self._stream)
        both = [self._source.pointer, self._opened[peer].pointer]
        self._kernel.launch(both, both, (0, self._n_elements), "mean")
        end.record(self._stream)
        end.synchronize()
        return float(end.time_since(begin)) / 1e3

    def _judge(self, rank: int, peer: int, results: list[tuple[float, int, int]]) -> Pair:
        seconds, read, _ = results[rank]
        written = results[peer][2]
        problem = ""
        if read or written:
            problem = (
                f"of {self._n_elements:,} numbers averaged by trainer {rank} with memory of trainer {peer}, "
                f"{read:,} were wrong on its own side and {written:,} on the other"
            )
        return Pair(rank, peer, 8 * self._n_elements / max(seconds, 1e-9) / 1e9, problem)

    def _fill(self, block: CudaBlock, rank: int, distance: int, side: int) -> None:
        self._memory.upload(block, self._values(rank, distance, side))

    def _compare(self, block: CudaBlock, rank: int, peer: int, distance: int) -> int:
        """Count the numbers in `block` that are not the mean of `rank`'s source and `peer`'s target."""
        values = np.empty(self._n_elements, np.float32)
        self._memory.driver.memcpy_dtoh(values, block.pointer)
        total = self._values(rank, distance, _SOURCE) + self._values(peer, distance, _TARGET)
        return int((values.view(np.uint32) != (total / np.float32(2)).view(np.uint32)).sum())

    def _values(self, rank: int, distance: int, side: int) -> np.ndarray:
        random = np.random.default_rng([rank, distance, side])
        values: np.ndarray = random.random(self._n_elements, np.float32)
        return values
