"""Traces, dry runs and schedules of a run; and Minerva's own snippets."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_programs import SIMULATED, run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from simulated import Simulation

from lockstep import flow
from lockstep.flow import owl
from lockstep.flow.trace import Task, active, critical_path, list_schedule


def test_a_trace_has_what_ran_where_and_what_it_waited_for(tmp_path: Path) -> None:
    with flow.Engine(flow.cpus(2)) as engine, flow.recording() as trace:
        first, second = engine.devices
        x, y = engine.variable("x"), engine.variable("y")
        is_running = threading.Event()  # the third operation, which does not wait for the first one
        engine.push(lambda: is_running.wait(limit(10)), writes=[x], device=first, name="make")
        engine.push(lambda: time.sleep(0.01), reads=[x], writes=[y], device=second, name="use")
        engine.push(is_running.set, device=second, name="<alone>")
        engine.push(int, reads=[y], writes=[x], device=first, name="end")
        engine.wait_all()
    make, use, single, end = trace.operations
    assert (make.device, use.device, use.lane) == ("cpu:0", "cpu:1", "cpu:1 compute")
    assert use.waited_for == [make.number] and single.waited_for == []
    assert set(end.waited_for) == {make.number, use.number}
    assert make.stop <= use.start and single.start < make.stop and use.seconds >= 0.01
    summary = trace.summary()
    assert "critical path" in summary and "make > use > end" in summary and "list schedule" in summary
    assert "cpu:0 compute: busy" in summary

    for suffix in ("json", "html", "dot"):
        trace.save(tmp_path / f"trace.{suffix}")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"make", "use", "<alone>", "end"}
    assert len([e for e in events if e["ph"] == "s"]) == len([e for e in events if e["ph"] == "f"]) == 3
    page = (tmp_path / "trace.html").read_text()
    assert (
        "&lt;alone&gt;" in page
        and "<alone>" not in page
        and "http" not in page.replace("http://www.w3.org", "")
    )
    assert f"o{make.number} -> o{use.number};" in (tmp_path / "trace.dot").read_text()


def test_operations_of_threads_that_push_at_the_same_time_have_a_summary() -> None:
    """The one that is numbered first may be submitted last, and wait for the other."""
    with flow.Engine(flow.cpus(1)) as engine, flow.recording() as trace:
        x, lane = engine.variable("x"), engine.lane(engine.devices[0], "compute")
        use, make = engine.operation(int, lane, "use"), engine.operation(int, lane, "make")
        engine.submit(make, [], [x])
        engine.submit(use, [x], [])
        engine.wait_all()
    assert [o.name for o in trace.operations] == ["use", "make"]
    assert "in 2 operations: make > use" in trace.summary()


def test_graphviz_gets_names_of_other_alphabets_as_numbers_of_characters(tmp_path: Path) -> None:
    """It would show an escape of JSON as letters."""
    with flow.Engine(flow.cpus(1)) as engine, flow.recording() as trace:
        engine.push(int, name='Größe "1"').wait()

    def step(x: torch.Tensor) -> torch.Tensor:
        flow.call(größe, x)
        return x + 1

    trace.save(tmp_path / "trace.dot")
    assert 'Gr&#246;&#223;e \\"1\\"' in (tmp_path / "trace.dot").read_text()
    assert "gr&#246;&#223;e" in flow.capture(step, torch.ones(2)).to_dot()


def größe(x: torch.Tensor) -> int:
    return x.numel()


def test_recordings_inside_each_other_have_their_own_operations() -> None:
    with flow.Engine(flow.cpus(1)) as engine:
        with flow.recording() as outer:
            with flow.recording() as inner:  # equal so far
                engine.push(int, name="both").wait()
            engine.push(int, name="outer").wait()
        engine.push(int, name="neither").wait()
    assert [[o.name for o in each.operations] for each in (outer, inner)] == [["both", "outer"], ["both"]]
    with flow.recording():
        with flow.recording() as empty:
            pass
        assert len(active) == 1 and active[0] is not empty
    assert not active


def test_phases_of_a_training_step() -> None:
    with flow.Engine(flow.cpus(1)), flow.recording() as trace:
        layer = flow.arrays(torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        layer(flow.ones((4, 3))).sum().backward()
        optimizer.step()
        layer.weight.numpy()
    phases = {o.name: o.phase for o in trace.operations}
    assert phases["addmm"] == "forward" and phases["mm"] == "backward" and phases["fetch"] == "fetch"
    assert {o.phase for o in trace.operations if o.name == "add_"} == {"update"}


def test_a_dry_run_schedules_and_does_not_execute() -> None:
    with flow.Engine(flow.cpus(2)) as engine:
        ran: list[int] = []
        x = flow.ones((3,))
        with flow.recording() as trace, flow.dry_run():
            engine.push(lambda: ran.append(1))
            x += 1
            y = torch.exp(x)
        assert ran == [] and x.tolist() == [1, 1, 1]
        assert [o.name for o in trace.operations] == ["operation", "add_", "exp"]
        assert trace.operations[2].waited_for == [trace.operations[1].number]
        with pytest.raises(flow.OperationError, match="made in a dry run"):
            y.numpy()
        program = flow.capture(lambda x: x * 2, torch.ones(2))
        with flow.dry_run():
            assert program(torch.ones(2)) is None
        assert program(torch.ones(2)).tolist() == [2, 2]


def test_copies_of_a_dry_run_are_not_used_afterwards() -> None:
    devices = flow.cpus(2)
    devices[1].memory = "far"
    with flow.Engine(devices):
        x = flow.ones((3,))
        with flow.device(devices[1]):
            with flow.recording() as trace, flow.dry_run():
                x + 1, x * 2
            assert [o.name for o in trace.operations] == ["copy", "add", "mul"]
            assert (x + 1).tolist() == [2, 2, 2]


graphs = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.lists(st.integers(0, 30), max_size=3)), max_size=15
)


@settings(deadline=None, max_examples=60)
@given(graphs)
def test_schedules_keep_their_bounds(graph: list) -> None:
    """A list schedule is no shorter than the longest path or the busiest lane, nor longer than all of it."""
    tasks = {
        number: Task(lane, float(seconds), [before % number for before in after] if number else [])
        for number, (lane, seconds, after) in enumerate(graph)
    }
    longest, path = critical_path(tasks)
    total = sum(task.seconds for task in tasks.values())
    lanes = [sum(task.seconds for task in tasks.values() if task.lane == lane) for lane in "ab"]
    assert max(longest, *lanes) <= list_schedule(tasks) <= total
    assert sum(tasks[number].seconds for number in path) == longest
    assert all(before in tasks[after].after for before, after in pairwise(path))
    if len({task.lane for task in tasks.values()}) == 1:
        assert list_schedule(tasks) == total


def test_a_list_schedule_by_hand() -> None:
    tasks = {0: Task("a", 2, []), 1: Task("b", 3, [0]), 2: Task("a", 4, []), 3: Task("a", 1, [1, 2])}
    assert list_schedule(tasks) == 7
    assert critical_path(tasks) == (6, [0, 1, 3])


SNIPPETS = """
import numpy as np
from lockstep.flow import owl
gpu0 = owl.create_{kind}_device({first})
gpu1 = owl.create_{kind}_device({second})
owl.set_device(gpu0)
x = owl.zeros([100, 200])
owl.set_device(gpu1)
y = owl.zeros([100, 200])
z = x + y
names = [array.place.name for array in (x, y, z)]
assert names == ["{kind_name}:0", "{kind_name}:1", "{kind_name}:1"], names
assert not owl.to_numpy(z).any() and owl.to_numpy(z).shape == (100, 200)

gpus = [gpu0, gpu1]
num_gpu = len(gpus)
weights = owl.from_numpy(np.ones((4, 2)))
data = np.arange(32.0).reshape(8, 4)
train_set = [(data[i : i + 2], np.ones((2, 2))) for i in range(0, 8, 2)]
def ff_and_bp(data, label):
    data, label = owl.from_numpy(data), owl.from_numpy(label)
    return [data.t() @ (data @ weights - label)]
def update(grad):
    weights.sub_(grad[0] * 1e-3)
for mbidx in range(0, len(train_set), num_gpu):
    grads = []
    for i in range(num_gpu):
      owl.set_device(gpus[i])  # calculate each gradient on different GPU
      (data, label) = train_set[mbidx + i]
      grad_each = ff_and_bp(data, label)
      grads.append(grad_each)
    owl.set_device(gpus[0])    # (optional) choose GPU#0 for update
    grad = owl.accumulate(grads)
    update(grad)
owl.wait_for_all()
plain = np.ones((4, 2), np.float32)
for first in (0, 2):
    gradient = sum(d.T @ (d @ plain - l) for d, l in train_set[first : first + 2])
    plain -= gradient.astype(np.float32) * np.float32(1e-3)
np.testing.assert_allclose(owl.to_numpy(weights), plain, rtol=1e-4)
try:
    owl.set_device(7)
except ValueError as error:
    print(error)
"""


def test_minervas_snippets_run_on_cpu_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owl, "_created", [])
    program = SNIPPETS.format(kind="cpu", kind_name="cpu", first="", second="")
    with ThreadPoolExecutor(1) as thread:  # its own, so it has its own current device
        thread.submit(exec, program, {}).result()
    assert capsys.readouterr().out == "owl.set_device: there is no device 7; 2 have been created\n"


def test_owl_copies_numpy_arrays_of_any_strides() -> None:
    """As of mirrored images; those of float64 were always copied."""
    image = np.arange(6, dtype=np.float32).reshape(2, 3)
    for data in image, image[:, ::-1], image.T[::-2], image[0, 0], image.astype(np.float64)[::-1]:
        found = owl.to_numpy(owl.from_numpy(data))
        assert found.shape == data.shape
        np.testing.assert_array_equal(found, data)


@pytest.mark.slow
def test_minervas_snippets_run_on_the_simulated_driver(simulation: Simulation) -> None:
    refused = (
        "from lockstep import flow\ntry:\n    flow.cuda(3)\nexcept ValueError as error:\n    print(error)\n"
    )
    program = SIMULATED + refused + SNIPPETS.format(kind="gpu", kind_name="cuda", first=0, second=1)
    out = run_program(program, simulation.environment()).splitlines()
    assert "cuda:3 is not there: 2 NVIDIA GPUs" in out[0]
    assert out[1] == "owl.set_device: there is no device 7; 2 have been created"
