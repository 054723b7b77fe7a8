"""make bench-peers: contenders take turns, and a target that is missed is called short."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.measure import verdict
from benchmarks.peers import __main__ as peers
from benchmarks.peers import duel as duels
from benchmarks.peers.contender import CONTENDERS
from benchmarks.step import stepping

# Takes twice as long as it says, under the name "slow"; writes down whose turn it was.
FAKE = """
import os, sys
name = sys.argv[1]
if name == "broken":
    sys.exit("no such network")
print("ready", flush=True)
for line in sys.stdin:
    with open(os.environ["PEERS_FOLDER"] + "/turns", "a") as file:
        file.write(name + " ")
    seconds = int(line) * (0.5 if name == "slow" else 0.25)
    print(seconds, seconds, flush=True)
"""


def test_contenders_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duels, "PROGRAM", [sys.executable, "-c", FAKE])
    found = duels.duel("ours", "slow", 4, 3, str(tmp_path))
    assert found["ratio"] == found["ratio of processor time"] == 2
    assert found["slow"] == {"ms": 500, "least": 500, "most": 500}
    assert (tmp_path / "turns").read_text().split() == ["ours", "slow"] * 3
    with pytest.raises(RuntimeError, match="broken can't begin"):
        duels.duel("ours", "broken", 1, 1, str(tmp_path))


def test_targets_are_passed_or_short() -> None:
    assert verdict(1.5, 1.5) == "target >= 1.5: pass" and verdict(1.4, 1.5).endswith("short")
    assert verdict(1.01, 1.02, at_most=True) == "target <= 1.02: pass"
    contenders = {f"Lockstep, AlexNet {ours}" for ours, _, _ in stepping.STOCK}
    contenders |= {f"stock PyTorch, AlexNet {theirs}" for _, theirs, _ in stepping.STOCK}
    assert contenders <= CONTENDERS.keys()
    assert {name for duel in peers._DUELS for name in duel[:2]} <= CONTENDERS.keys()


def test_the_command_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duels, "PROGRAM", [sys.executable, "-c", FAKE])
    monkeypatch.setattr(peers.pair, "lockstep", lambda folder, number: 300.0)
    monkeypatch.setattr(peers.pair, "ddp", lambda folder, number: 200.0)
    monkeypatch.setattr(sys, "argv", ["peers", "--repeats", "2", "--results", str(tmp_path)])
    peers.main()
    kept = json.loads((tmp_path / "peers.json").read_text())
    assert "1.50 x" in (tmp_path / "peers.md").read_text() and "two processes, digits" in str(kept)
