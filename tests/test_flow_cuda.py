"""ParallelExecutor on GPUs: on the simulated driver, with random pauses, it has the bits of CPU devices."""

import pytest
from simulated import Simulation
from test_flow_seeing import SIMULATED, run_program

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
torch.set_num_threads(1)
wanted, _ = train(flow.cpus(2, threads=1), "all_reduce")
for how, strategy in (("events", "all_reduce"), ("host", "reduce")):
    flow.waiting(how)
    found, lanes = train([flow.cuda(0), flow.cuda(1)], strategy)
    assert lanes == {"compute", "communication", "fetch"}, lanes
    assert all(torch.equal(value, found[name]) for name, value in wanted.items()), (how, strategy)
    print(how, strategy, "same bits")
"""

GPU_RUN = """
made = [flow.cuda(0), flow.cuda(0)]
found, _ = train(made, "all_reduce")
for how in ("events", "host"):
    flow.waiting(how)
    for strategy in ("all_reduce", "reduce"):
        other, _ = train([flow.cuda(0), flow.cuda(0)], strategy)
        assert all(torch.equal(value, other[name]) for name, value in found.items()), (how, strategy)
        print(how, strategy, "same bits")
"""


def test_simulated_gpus_have_the_bits_of_cpus(simulation: Simulation) -> None:
    environment = simulation.set(delay=300).environment()
    out = run_program(SIMULATED + TRAIN + SIMULATED_RUN, environment)
    assert out.count("same bits") == 2


@pytest.mark.gpu
def test_a_gpu_has_the_same_bits_by_any_strategy_and_way_of_waiting() -> None:
    out = run_program(TRAIN + GPU_RUN)
    assert out.count("same bits") == 4
