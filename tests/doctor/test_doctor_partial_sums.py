"""The doctor counts the partial sums of gradients that a run with logical ranks needs."""

from pathlib import Path

import pytest
from conftest import make_config, make_folder

from lockstep.doctor import partial_sums
from lockstep.doctor.report import Report
from lockstep.errors import UserError


def config_of(place: Path, **values: object) -> object:
    keys = {"global_batch_size": 16, "data_folder": str(make_folder(place / "set")), **values}
    return make_config(**keys)


def test_partial_sums_are_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, logical_ranks=8, shares=(5, 3))
    (line,) = partial_sums.describe(config, ("cpu", "cpu"))  # type: ignore[arg-type]
    assert line.text.startswith("2 trainer(s) keep 2 partial sum(s) of gradients of ") and not line.wrong
    equal = config_of(tmp_path / "equal", logical_ranks=8)
    (line,) = partial_sums.describe(equal, ("cpu", "cpu"))  # type: ignore[arg-type]
    assert "keep 1 partial sum(s)" in line.text
    assert list(partial_sums.describe(config_of(tmp_path / "none"), ("cpu",))) == []  # type: ignore[arg-type]


def test_sums_that_dont_fit_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(partial_sums, "allowed_bytes", lambda: 1000)
    config, report = config_of(tmp_path, logical_ranks=8, shares="auto"), Report()
    report.show_all("logical ranks", lambda: partial_sums.describe(config, ("cpu", "cpu", "cpu")))  # type: ignore[arg-type]
    assert report.n_wrong == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "WRONG: 3 trainer(s) keep 4 partial sum(s)" in line and "set shares: equal" in line


def test_devices_that_cant_share_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 trainers can't share 2"):
        list(partial_sums.describe(config_of(tmp_path, logical_ranks=2), ("cpu",) * 3))  # type: ignore[arg-type]
