"""What can't be over several hosts is refused before anything begins: keys, devices, hosts that differ."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_config

from lockstep.config import Layer, read_command_line, resolve
from lockstep.config.rules import rule_of, settle
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.hosts.agreement import agree, facts_of

HOSTS = {"hosts": 2, "host": 0, "meeting_point": "10.0.0.1:29500", "run_name": "run"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("host=null", "host must say which of the hosts this is, 0 to 1"),
        ("host=2", "host must be from 0 to 1, for there are 2: 2"),
        ("meeting_point=null", "meeting_point must be given with hosts"),
        ("meeting_point=10.0.0.1", "meeting_point must be ADDRESS:PORT of host 0"),
        ("meeting_point=10.0.0.1:65536", "meeting_point must be ADDRESS:PORT of host 0"),
        ("on_loss=restart", "on_loss can't be restart with 2 hosts: torchrun or Slurm"),
        ("load_epoch=3", "load_epoch must be latest with 2 hosts"),
        ("rule=elastic", "rule elastic is for one host"),
        ("exchange=swap", "exchange swap is for one host"),
        ("sync_batch_norm=true", "sync_batch_norm would meet over the network in every layer"),
        ("hosts=3 parts=4 minibatch=8", "hosts must be a power of two with parts, not 3"),
        ("wire=int8 rule=local", "wire int8 rounds gradients: it goes with rule: gradients, not"),
        ("wire=bfloat16 parts=4 minibatch=8", "wire bfloat16 rounds gradients"),
        ("wire=float16", "wire must be 'float32' or 'bfloat16' or 'int8', not 'float16'"),
    ],
)
def test_errors_name_source_key_and_remedy(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([Layer("base", HOSTS), read_command_line(re.split(r" (?=\w+=)", words))])
    assert message in str(caught.value)
    assert str(caught.value).startswith("command line")


@pytest.mark.parametrize("values", [{"optimizer": "adamw"}, {"clip_norm": 1.0}], ids=["adamw", "clip_norm"])
def test_rules_that_average_inside_a_host_need_what_is_exact_there(values: dict[str, Any]) -> None:
    keys = {**HOSTS, **values, "rule": "local"}
    settle(make_config(**keys, devices=["cpu"]))
    with pytest.raises(UserError, match=r"rule: local averages weights .* give each host one device"):
        settle(make_config(**keys, devices=["cpu", "cpu"]))


def test_several_hosts_take_gradients_and_count_all_trainers() -> None:
    config = make_config(**HOSTS, devices=["cpu"], minibatch=9)
    assert rule_of(config) == "gradients" and config.n_trainers == 2
    assert settle(config)[0].batch_size == 5
    with pytest.raises(UserError, match="3 pictures are too few for 4 trainers"):
        settle(make_config(**HOSTS, devices=["cpu", "cpu"], minibatch=3))


def test_hosts_agree_or_the_first_that_differs_is_named(shared_folder: Path) -> None:
    """Places and numbers of threads are each host's own; what is learned, and from what, is not."""

    def facts(**values: Any) -> dict[str, Any]:
        config = make_config(**{**HOSTS, "data_folder": str(shared_folder), **values})
        return facts_of(config, open_dataset(config))

    def meet(*hosts: dict[str, Any]) -> None:
        agree(SimpleNamespace(gather=lambda key, value, seconds: list(hosts)), hosts[0], 1.0)  # type: ignore[arg-type]

    ours = facts()
    meet(ours, facts(host=1, cpu_threads=3, address="10.0.0.2", weights_dir="/elsewhere"))
    for values, message in (
        ({"seed": 1}, "seed: 0 on host 0, 1 on host 2: it has to be the same on all hosts"),
        ({"devices": ["cpu", "cpu"]}, "trainers per host: 1 on host 0, 2 on host 2"),
        ({"optimizer_args": {"bias_rate": 1}}, "optimizer_args: {} on host 0, {'bias_rate': 1} on host 2"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            meet(ours, ours, facts(**values))
    with pytest.raises(UserError, match=r"checksum of the data: \w+ on host 0, other on host 1"):
        meet(ours, {**ours, "checksum of the data": "other"})
    with pytest.raises(UserError, match=r"version of torch: .* on host 0, nothing on host 1"):
        meet(ours, {key: value for key, value in ours.items() if key != "version of torch"})
