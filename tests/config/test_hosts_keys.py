"""Refusals over several hosts before anything begins: keys, devices, hosts that differ."""

import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, make_config

from lockstep.config import Layer, read_command_line, resolve
from lockstep.config.rules import rule_of, settle
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.hosts.agreement import agree, facts_of

HOSTS = {"n_hosts": 2, "host_rank": 0, "rendezvous": "10.0.0.1:29500", "run_name": "run"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("host_rank=null", "host_rank must be this host's number, 0 to 1"),
        ("host_rank=2", "host_rank must be from 0 to 1 with 2 hosts: 2"),
        ("rendezvous=null", "rendezvous must be given with n_hosts"),
        ("rendezvous=10.0.0.1", "rendezvous must be ADDRESS:PORT of host 0"),
        ("rendezvous=10.0.0.1:65536", "rendezvous must be ADDRESS:PORT of host 0"),
        (
            "on_failure=shrink global_batch_size=16",
            "on_failure can't be shrink with 2 hosts, which need equally many devices: set restart",
        ),
        ("rejoin_seconds=-1", "rejoin_seconds must be at least 0, not -1.0"),
        ("rejoin_seconds=5 on_failure=stop", "rejoin_seconds needs on_failure: restart"),
        ("load_epoch=3", "load_epoch must be latest with 2 hosts"),
        ("rule=elastic", "rule elastic is for one host"),
        ("exchange=swap", "exchange swap is for one host"),
        ("sync_batch_norm=true", "sync_batch_norm would synchronize over the network in every layer"),
        (
            "n_hosts=3 logical_ranks=4 global_batch_size=8",
            "n_hosts must be a power of two with logical_ranks, not 3",
        ),
        ("logical_ranks=6 global_batch_size=8", "logical_ranks must be a power of two with 2 hosts, not 6"),
        (
            "logical_ranks=4 global_batch_size=8 shares=[3,1]",
            "shares is for one host: with 2 hosts set shares: equal",
        ),
        (
            "network_dtype=bfloat16 rule=local",
            "network_dtype bfloat16 rounds gradients: it goes with rule: gradients, not",
        ),
        (
            "network_dtype=bfloat16 logical_ranks=4 global_batch_size=8",
            "network_dtype bfloat16 rounds gradients",
        ),
        ("network_dtype=int8", "network_dtype must be 'float32' or 'bfloat16', not 'int8'"),
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
    config = make_config(**HOSTS, devices=["cpu"], global_batch_size=9)
    assert rule_of(config) == "gradients" and config.n_trainers == 2
    assert settle(config)[0].batch_size == 5
    with pytest.raises(UserError, match="3 images are too few for 4 trainers"):
        settle(make_config(**HOSTS, devices=["cpu", "cpu"], global_batch_size=3))


def test_hosts_agree_or_the_first_that_differs_is_named(shared_folder: Path) -> None:
    """Places and numbers of threads are each host's own; what is learned, and from what, is not."""

    def facts(**values: Any) -> dict[str, Any]:
        config = make_config(**{**HOSTS, "data_folder": str(shared_folder), **values})
        return facts_of(config, open_dataset(config))

    def join_rendezvous(*hosts: dict[str, Any]) -> list[str]:
        return agree(SimpleNamespace(gather=lambda key, value, seconds: list(hosts)), hosts[0], 1.0)  # type: ignore[arg-type]

    ours = facts()
    join_rendezvous(
        ours, facts(host_rank=1, cpu_threads=3, host_address="10.0.0.2", weights_dir="/elsewhere")
    )
    for values, message in (
        ({"seed": 1}, "seed: 0 on host 0, 1 on host 2: it has to be the same on all hosts"),
        ({"devices": ["cpu", "cpu"]}, "devices: 1 x CPU on host 0, 2 x CPU on host 2"),
        ({"optimizer_args": {"bias_rate": 1}}, "optimizer_args: {} on host 0, {'bias_rate': 1} on host 2"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            join_rendezvous(ours, ours, facts(**values))
    two_orders = [{"fc*": 0.1, "*.bias": 3}, {"*.bias": 3, "fc*": 0.1}]  # the last one that matches counts
    named = re.escape("learning_rates: [['fc*', 0.1], ['*.bias', 3]] on host 0, [['*.bias', 3]")
    with pytest.raises(UserError, match=named):
        join_rendezvous(*(facts(learning_rates=rates) for rates in two_orders))
    exact = {"logical_ranks": 4, "global_batch_size": 64}
    threads = "cpu_threads: 2 on host 0, 1 on host 1: it has to be the same .* Set cpu_threads on all hosts"
    with pytest.raises(UserError, match=threads):
        join_rendezvous(facts(**exact, cpu_threads=2), facts(**exact, cpu_threads=1))
    other = {**facts(**exact, cpu_threads=1), "kinds of processors": "another"}
    (note,) = join_rendezvous(facts(**exact, cpu_threads=1), other)
    assert re.match("kinds of processors: .* on host 0, another on host 1: they may round differently", note)
    several = (
        facts(global_batch_size=64, batch_size=32),
        facts(global_batch_size=64, batch_size=16, devices=["cpu", "cpu"]),
    )
    with pytest.raises(UserError, match="devices: 1 x CPU on host 0, 2 x CPU on host 1"):  # not batch_size
        join_rendezvous(*several)
    with pytest.raises(UserError, match=r"checksum of the data: \w+ on host 0, other on host 1"):
        join_rendezvous(ours, {**ours, "checksum of the data": "other"})
    with pytest.raises(UserError, match=r"version of torch: .* on host 0, nothing on host 1"):
        join_rendezvous(ours, {key: value for key, value in ours.items() if key != "version of torch"})


@pytest.mark.parametrize("key", ["model", "loss", "augmentation"])
def test_hosts_with_other_files_of_the_users_code_do_not_start(
    key: str, shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas would be equal, and trained by gradients of two networks or losses."""
    path, code = tmp_path / f"users_{key}.py", f"users_{key}:Code"
    monkeypatch.syspath_prepend(str(tmp_path))

    def facts(source: str) -> dict[str, Any]:
        path.write_text(source)
        config = make_config(**HOSTS, data_folder=str(shared_folder), **{key: code})
        return facts_of(config, open_dataset(config))

    hosts = [facts("Code = 1"), facts("Code = 1"), facts("Code = 2")]
    message = rf"source of {code}: \w+ on host 0, \w+ on host 2: it has to be the same on all hosts"
    with pytest.raises(UserError, match=message):
        agree(SimpleNamespace(gather=lambda key, value, seconds: hosts), hosts[0], 1.0)  # type: ignore[arg-type]
    assert agree(SimpleNamespace(gather=lambda key, value, seconds: hosts[:2]), hosts[0], 1.0) == []  # type: ignore[arg-type]


def test_the_page_lists_the_keys_that_may_differ(shared_folder: Path) -> None:
    _, _, rest = (ROOT / "docs/hosts.md").read_text().partition("These may differ: ")
    listed = set(re.findall(r"`(\w+)`", rest.partition("\n\n")[0])) - {"logical_ranks"}
    config = make_config(**HOSTS, data_folder=str(shared_folder))
    free = asdict(config).keys() - facts_of(config, open_dataset(config)).keys()
    paths = {name for name in free if name.endswith(("_folder", "_file", "_dir"))}
    assert paths >= {"data_folder", "cache_folder", "weights_dir"}
    assert free - paths - {"host_rank", "host_address", "rendezvous"} == listed
