"""Two launchers on this machine train as one host does."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Program, make_config
from two_hosts import end_well, start, tensors_of

from lockstep.comm.messages import Order, WarningMessage
from lockstep.config.layers import Layer, resolve
from lockstep.network.recorder import HostStopwatch, Recorder
from lockstep.trainer.coordinator import what_reduces
from lockstep.trainer.progress import ProgressReporter

KEYS = ("global_batch_size=16", "n_epochs=2", "snapshot_freq=1")


def test_two_hosts_have_the_bits_of_one(program: Program) -> None:
    """With parts: files of all checkpoints; losses in the log, bytes inside and outside of a host apart."""
    words = (*KEYS, "logical_ranks=2")
    two = start(program, *words, "run_name=run", "devices=[cpu]")
    one = program.start(
        *words, "cpu_threads=1", "run_name=run", f"weights_dir={program.place / 'one'}", devices="[cpu, cpu]"
    )
    one.run_folder = program.place / "one" / "run"
    end_well([*two, one])
    assert len(tensors_of(one)) == 2
    assert tensors_of(two[0]) == tensors_of(two[1]) == tensors_of(one)
    ours, theirs = (
        [json.loads(line) for line in (run.run_folder / "log.jsonl").read_text().splitlines()]
        for run in (two[0], one)
    )
    received, expected = ([each for each in log if each["event"] == "progress"] for log in (ours, theirs))
    assert [(each["loss"], each["error"]) for each in received] == [(e["loss"], e["error"]) for e in expected]
    assert all(each["network_bytes_per_step"] > 1e6 and not each["bytes_per_step"] for each in received)
    assert all(each["bytes_per_step"] > 1e6 and not each["network_bytes_per_step"] for each in expected)
    assert "note: network: " in two[0].output() and "ms of compute" in two[0].output()


def test_what_an_exchange_costs_is_told_after_four_steps_of_which_the_first_does_not_count() -> None:
    received: list[Any] = []
    coordinator: Any = SimpleNamespace(world=SimpleNamespace(local_rank=0), has_cost=True)
    coordinator.cost = lambda n_bytes, seconds: f"{n_bytes:g} bytes beside {seconds:g} s"
    watch = HostStopwatch()
    recorder = Recorder(torch.device("cpu"), watch)
    reporter = ProgressReporter(SimpleNamespace(send=received.append), coordinator, make_config(), recorder)  # type: ignore[arg-type]
    for step, seconds in enumerate((9.0, 1.0, 2.0, 3.0, 9.0), 1):
        watch._seconds["compute"] += seconds
        recorder.count_step(0, 100)
        reporter.tick(Order("train", 1, step, 0, 1, 0, 1), 20)
    assert [each.text for each in received if isinstance(each, WarningMessage)] == ["100 bytes beside 2 s"]


@pytest.mark.parametrize("rule", ["auto", "gradients", "weights", "local", "outer", "logical_ranks"])
def test_only_keys_that_go_with_the_rule_are_named_as_cheaper(rule: str) -> None:
    keys: dict[str, Any] = {"n_hosts": 2, "host_rank": 0, "rendezvous": "127.0.0.1:1", "run_name": "run"}
    keys["global_batch_size"] = 16
    keys |= {"logical_ranks": 2} if rule == "logical_ranks" else {"rule": rule}
    advice = what_reduces(resolve([Layer("config.yaml", keys)])[0])
    named = {
        "a larger global_batch_size": {"global_batch_size": 32},
        "a larger accumulate": {"accumulate": 2},
        "a larger `every`": {"rule_args": {"every": 64}},
        "network_dtype: bfloat16": {"network_dtype": "bfloat16"},
        "rule: gradients with factors: true": {"rule": "gradients", "factors": True},
        "rule: local": {"rule": "local"},
    }
    changes = [change for words, change in named.items() if words in advice]
    assert changes
    for change in changes:
        resolve([Layer("config.yaml", keys), Layer("command line", change)])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gradients", "weights", "local", "outer"])
def test_every_rule_trains_over_hosts_of_two(program: Program, rule: str) -> None:
    running = start(
        program, *KEYS, f"rule={rule}", "network_dtype=bfloat16" if rule == "gradients" else "seed=0"
    )
    end_well(running)
    assert len(tensors_of(running[0])) == 2 and tensors_of(running[0]) == tensors_of(running[1])
