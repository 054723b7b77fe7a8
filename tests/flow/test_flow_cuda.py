"""ParallelExecutor on GPUs: on the simulated driver, with random pauses, it has the bits of CPU devices."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flow_programs import SIMULATED, run_program
from simulated import Simulation

from lockstep.flow import gpu

TRAIN = """
import torch, torch.nn.functional as F
from torch import nn
from lockstep import flow

def loss(model, x, labels):
    scores = model(x)
    return F.cross_entropy(scores, labels), {"scores": scores}

def train(devices, strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
                          nn.Dropout(0.3), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 3))
    x, labels = torch.randn(9, 1, 8, 8), torch.randint(0, 3, (9,))
    with flow.Engine(devices):
        made = flow.ParallelExecutor(model, loss, lambda p: torch.optim.SGD(p, 0.05, 0.9), devices,
                                     strategy=strategy, bucket_mb=1e-3)
        for rows in (9, 1, 9, 5):
            found = made.run({"x": x[:rows], "labels": labels[:rows]}, ("loss", "scores"))
        lanes = {o.lane for o in made.program.operations}
        found |= made.evaluate(loss, {"x": x, "labels": labels}, ["scores"])
        replicas = [made.replica(d) for d in range(len(devices))]
    for other in replicas[1:]:
        assert all(torch.equal(value, other[name]) for name, value in replicas[0].items())
    return {**found, **replicas[0]}, lanes
"""

SIMULATED_RUN = """
from lockstep.kernels.fold import ReduceKernel
from lockstep.flow.lanes import WORKER, Operation
torch.set_num_threads(1)
launched, fold = [], ReduceKernel.launch

def noting(self, sources, targets, span, op):
    if op == "sum":  # not the proof of peer access
        launched.append((WORKER.lane.kind, len(sources), len(targets), op))
    fold(self, sources, targets, span, op)

ReduceKernel.launch = noting
devices = lambda: [flow.cuda(0), flow.cuda(1)]
wanted, _ = train(flow.cpus(2, threads=1), "all_reduce")
same = lambda found: all(torch.equal(value, found[name]) for name, value in wanted.items())
for how, strategy in (("events", "all_reduce"), ("events", "reduce"), ("host", "reduce")):
    flow.waiting(how)
    found, lanes = train(devices(), strategy)
    assert lanes == {"compute", "communication", "fetch"}, lanes
    assert same(found), (how, strategy)
    print(how, strategy, "same bits")
    kinds, launched[:] = set(launched), []
    print(strategy, "by", sorted(kinds))
flow.waiting("events")
Operation._follow_events = lambda self: self._awaits.clear()

def goes_wrong():
    try:
        return not same(train(devices(), "all_reduce")[0])
    except AssertionError:  # the replicas differ
        return True

assert any(goes_wrong() for _ in range(5)), "no lane had to wait for another"
"""

NO_PEERS = """
torch.set_num_threads(1)
wanted, _ = train(flow.cpus(2, threads=1), "all_reduce")
found, _ = train([flow.cuda(0), flow.cuda(1)], "all_reduce")
assert all(torch.equal(value, found[name]) for name, value in wanted.items())
print("same bits")
"""

# Each kernel's writes to the other GPU are lost, which the driver does not know.
LOST_WRITES = """
from lockstep.kernels.fold import ReduceKernel
launch, sums = ReduceKernel.launch, []

def lose(self, sources, targets, span, op):
    sums.append(op)
    launch(self, sources, targets[:1], span, op)

ReduceKernel.launch = lose
first, second = flow.cuda(0), flow.cuda(1)
assert not first.copies_from(second) and not first.reaches(second, torch.float32)
assert sums == ["mean"] and first.copies_from(first) and not first.copies_from(flow.cpus(1)[0])
"""

BLOCKS = """
from lockstep import flow
from lockstep.flow import collectives
from lockstep.memory import cuda

def on(device, numbers):
    "An array whose memory is a block of the simulated device's."
    block = device._memory.allocate(4 * len(numbers), "a test's numbers")
    value = cuda.as_bytes(block, device.name)[:4 * len(numbers)].view(torch.float32)
    value.copy_(torch.tensor(numbers))
    made = flow.zeros((len(numbers),)) + 0
    made.wait().memory.cell.value = value
    return made

one, two = flow.cuda(0), flow.cuda(1)
with flow.Engine([one, two]):
    parts = []
    for device, numbers in ((one, [1e8, 1.0, 3.0]), (two, [-1e8, 2.0, 4.0])):
        device._memory.context.push()
        with flow.device(device):
            parts.append([on(device, numbers * 11)])
        device._memory.context.pop()
    assert one.reaches(two, torch.float32) and not one.reaches(two, torch.float64)
    sums, _ = collectives.reduce(parts, two, in_all=True)
    for array in (sums[0], *(part[0] for part in parts)):
        assert array.tolist() == [0.0, 3.0, 7.0] * 11
    print("in place")
"""

STREAMS = """
import weakref
import pycuda.driver as driver
from lockstep import flow
made, make = [], driver.Stream

def noting(*flags):
    stream = make(*flags)
    made.append(weakref.ref(stream))
    return stream

driver.Stream = noting
for _ in range(2):
    device = flow.cuda(0)
    with flow.Engine([device]), flow.device(device):
        assert (flow.array(torch.ones(3)) + 1).tolist() == [2.0, 2.0, 2.0]
    print(len(made), all(stream() is not None for stream in made))
"""

THREADS = """
import threading
from lockstep import flow

def use():
    devices = [flow.cuda(0), flow.cuda(1)]
    with flow.Engine(devices), flow.device(devices[1]):
        print((flow.array(torch.ones(3)) + 1).tolist(), devices[0].copies_from(devices[1]))

for _ in range(2):
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
print("the end")
"""

INTERRUPTS = """
import random, signal, sys
from lockstep import flow

def interrupt(*_):
    raise KeyboardInterrupt

lost, n = [], 0
sys.unraisablehook = lambda found: lost.append(str(found.object))
signal.signal(signal.SIGALRM, interrupt)
device = flow.cuda(0)
with flow.Engine([device]) as engine:
    while n < 2000:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + random.random() * 1e-3)
            while True:
                engine.push(lambda: None).wait()
        except KeyboardInterrupt:
            n += 1
print([each for each in lost if "Event" in each])
"""

# An interrupt just behind the launch of the proof of peer access.
INTERRUPTED_PROOF = """
from lockstep import flow
from lockstep.kernels.fold import ReduceKernel
launch = ReduceKernel.launch

def interrupted(*arguments):
    launch(*arguments)
    raise KeyboardInterrupt

first, second = flow.cuda(0), flow.cuda(1)
ReduceKernel.launch = interrupted
for _ in range(3):
    try:
        first.copies_from(second)
    except KeyboardInterrupt:
        pass
ReduceKernel.launch = launch
print(first.copies_from(second))
"""

GPU_RUN = """
from lockstep.kernels.fold import ReduceKernel
launched, fold = [], ReduceKernel.launch
ReduceKernel.launch = lambda self, *arguments: (launched.append(len(arguments[0])), fold(self, *arguments))
made = [flow.cuda(0), flow.cuda(0)]
found, _ = train(made, "all_reduce")
for how in ("events", "host"):
    flow.waiting(how)
    for strategy in ("all_reduce", "reduce"):
        other, _ = train([flow.cuda(0), flow.cuda(0)], strategy)
        assert all(torch.equal(value, other[name]) for name, value in found.items()), (how, strategy)
        print(how, strategy, "same bits")
assert set(launched) == {2}, "the kernel has merged"
"""


@pytest.mark.slow
def test_simulated_gpus_have_the_bits_of_cpus(simulation: Simulation) -> None:
    """The kernel runs in the communication lane's stream; without events the bits differ.

    The driver refuses a kernel that uses another device's memory without access to that.
    """
    environment = simulation.set(delay=300).environment()
    out = run_program(SIMULATED + TRAIN + BLOCKS + SIMULATED_RUN, environment)
    assert "in place" in out
    assert out.count("same bits") == 3
    assert "all_reduce by [('communication', 2, 2, 'sum')]" in out
    assert "reduce by [('communication', 2, 1, 'sum')]" in out


@pytest.mark.slow
def test_gpus_that_do_not_reach_each_other_copy(simulation: Simulation) -> None:
    environment = simulation.set(no_peer="0-1,1-0").environment()
    assert run_program(SIMULATED + TRAIN + NO_PEERS, environment) == "same bits\n"


@pytest.mark.slow
def test_gpus_whose_writes_get_lost_copy_through_the_host(simulation: Simulation) -> None:
    program = SIMULATED + TRAIN + LOST_WRITES + NO_PEERS
    assert run_program(program, simulation.environment()) == "same bits\n"


def test_only_memory_of_gpus_is_held_for_their_streams() -> None:
    """torch records the use of CUDA's memory only: an array of a CPU device is brought as it is.

    A sparse value has two memories.
    """
    recorded: list[str] = []
    device = object.__new__(gpu.Cuda)
    device._context = threading.local()
    device._context.torch_stream = "the lane's"
    there = SimpleNamespace(is_cuda=True, layout=torch.strided, record_stream=recorded.append)
    sparse = SimpleNamespace(layout=torch.sparse_coo, _indices=lambda: there, _values=lambda: there)
    values: list[Any] = [torch.ones(3), there, torch.ones(2, 2).to_sparse()]
    device.hold(values)
    assert recorded == ["the lane's"]
    device.hold([sparse])  # type: ignore[list-item]
    assert recorded == ["the lane's"] * 3


@pytest.mark.slow
def test_streams_outlive_their_lanes_and_are_reused(simulation: Simulation) -> None:
    """torch uses them once more, when memory that was used there is freed: maybe after the lane's end."""
    first, second = run_program(SIMULATED + STREAMS, simulation.environment()).splitlines()
    assert first == second and first.endswith(" True") and not first.startswith("0")


@pytest.mark.slow
def test_devices_may_be_made_in_threads(simulation: Simulation) -> None:
    """The thread's context was left behind, and PyCUDA aborted the process at its end."""
    out = run_program(SIMULATED + THREADS, simulation.environment())
    assert out == "[2.0, 2.0, 2.0] True\n" * 2 + "the end\n"


@pytest.mark.slow
def test_no_interrupt_is_lost_or_leaves_a_context_behind(simulation: Simulation) -> None:
    """Some came in the finalizer of an event, and others before the context of a wait was left."""
    assert run_program(SIMULATED + INTERRUPTS, simulation.environment()) == "[]\n"


@pytest.mark.slow
def test_an_interrupted_proof_of_peer_access_has_run(simulation: Simulation) -> None:
    """Its kernel was unloaded, and its blocks were freed, while it ran: a segmentation fault."""
    environment = simulation.set(delay=300).environment()
    assert run_program(SIMULATED + INTERRUPTED_PROOF, environment) == "True\n"


@pytest.mark.gpu
def test_a_gpu_has_the_same_bits_by_any_strategy_and_way_of_waiting() -> None:
    out = run_program(TRAIN + GPU_RUN)
    assert out.count("same bits") == 4
