"""Ranks on GPUs, for torch callables, on the simulated driver: modes, training, collectives, refusals.

torch computes on the host there; what is tested is all else: memory, copies, their order, the end.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT
from simulated import Simulation

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time

SCRIPT = """
    import numpy as np, torch
    import lockstep.synk as synk
    from lockstep.errors import UserError

    torch.set_num_threads(1)
    ranks = synk.fork(devices={devices!r}, master_rank={master})
    torch.manual_seed(0)

    def make_net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))

    net, lone = synk.share(make_net()), make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(lone.parameters(), lr=0.1, momentum=0.9)
    loss = torch.nn.functional.mse_loss

    def gradient(x, y):
        optimizer.zero_grad()
        found = loss(net(x), y)
        found.backward()
        return found

    def step():
        optimizer.step()

    def fold(x, weight):
        rows = torch.tanh(x) * weight
        return rows.mean(0), rows.sum(0), rows.amax(0), rows.amin(0), rows.prod(0), rows

    stored = synk.share(torch.zeros(1, 4))

    def from_stored():
        return torch.tanh(stored).sum(0)

    f = synk.function(gradient, "avg", updates=[synk.grads(net)])
    update = synk.function(step, None, updates=[synk.weights(net)])
    g = synk.function(fold, ["avg", "sum", "max", "min", "prod", "gather"], bcast_inputs=["weight"])
    h = synk.function(from_stored, "sum", sliceable_shareds=[stored])
    synk.distribute()

    def near(found, expected):
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.shape == expected.shape
        return np.abs(found - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1e-30)

    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 4)).astype("f4"), random.normal(size=(40, 2)).astype("f4")
    for number in range(6):
        batch = random.integers(0, 40, random.integers(1, 20))
        found = f(x, y, batch=batch, num_slices=1 + number % 3)
        synk.all_reduce(synk.grads(net), by_rows=True)
        update()
        reference.zero_grad()
        expected = loss(lone(torch.from_numpy(x[batch])), torch.from_numpy(y[batch]))
        expected.backward()
        reference.step()
        assert near(found, expected.item())
    weights = synk.gather(synk.weights(net))
    assert all(np.array_equal(value, weights[0]) for value in weights)
    assert near(weights[0], np.concatenate([p.detach().numpy().ravel() for p in lone.parameters()]))

    rows = np.tanh(x) * np.float32(0.9)
    folds = [rows.mean(0), rows.sum(0), rows.max(0), rows.min(0), rows.prod(0), rows]
    for n_slices in (1, 3):
        for found, expected in zip(g(x, np.float32(0.9), num_slices=n_slices), folds):
            assert near(found, expected)

    synk.scatter(stored, x)
    assert near(h(), np.tanh(x).sum(0)) and near(h(num_slices=2), np.tanh(x).sum(0))
    assert np.array_equal(synk.gather(stored, nd_up=0), x)

    for rank in range(ranks):
        synk.set_value(rank, synk.weights(net), np.full(weights[0].shape, rank + 1, "f4"))
    for op, expected in (("max", ranks), ("min", ranks), ("sum", ranks * ranks), ("avg", ranks * ranks)):
        synk.all_reduce(synk.weights(net), op)
        assert (synk.gather(synk.weights(net)) == expected).all(), op
    synk.broadcast(synk.weights(net), weights[0])
    assert np.array_equal(synk.get_value(ranks - 1, synk.weights(net)), weights[0])

    for make, words in (
        (lambda: synk.function([], None, name="graph"), "graph: PyTensor has no code for GPUs"),
        (lambda: synk.share(torch.zeros(2).double()), "on GPUs shared tensors are float32"),
        (lambda: synk.share(torch.nn.BatchNorm1d(3)), "buffers"),
    ):
        try:
            make()
        except (UserError, TypeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    transport = type(synk.session.current_team("").here.shareds[0].home._transport).__name__
    synk.close()
    print("well,", transport)
"""


@pytest.mark.parametrize(
    ("devices", "master", "fault", "transport"),
    [
        (["cuda:0", "cuda:1"], 0, "", "PeerTransport"),
        pytest.param(["cuda:0", "cuda:1"], 1, "lost", "StagedTransport", marks=pytest.mark.slow),
        pytest.param(["cuda:0", "cuda:0", "cuda:1"], 1, "", "PeerTransport", marks=pytest.mark.slow),
    ],
)
def test_callables_on_gpus_give_what_one_process_gives(
    simulation: Simulation, tmp_path: Path, devices: list[str], master: int, fault: str, transport: str
) -> None:
    environment = simulation.set(delay=300, all=1, **({fault: "0-1"} if fault else {})).environment()
    environment["PYTHONPATH"] += f":{ROOT}"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(devices=devices, master=master))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
    )
    assert done.stdout == f"well, {transport}\n", done.stderr
    assert list(simulation.folder.glob("memory-*")) == [], "closed and freed, in the right order"
