"""The parts of campaigns.goodput that can be tested without training."""

from pathlib import Path

import pytest

from campaigns import goodput


@pytest.mark.parametrize(("end", "code"), [("same", 0), ("other", 1)])
def test_the_table_has_the_figures_and_other_bits_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    runs = {"trial 0": (8.0, [], "trial"), "unbroken 0": (50.0, [], "same"), "unbroken 1": (45.0, [], "same")}
    strikes = [("SIGKILL", 0.5), ("SIGSEGV", 0.7), ("SIGSTOP", 2.6)]
    strikes += [(goodput.ALONE, 0.1), (goodput.ALONE, 0.3)]
    broken = {"broken 0": (60.0, strikes[:2], "same"), "broken 1": (40.0, strikes[2:], end)}
    n_epochs: list[str] = []

    def train(folder: Path, words: list[str], *_: float) -> tuple[float, list, str]:
        n_epochs.append(next(word for word in words if word.startswith("n_epochs=")))
        return (runs | broken)[folder.name]

    monkeypatch.setattr(goodput, "train", train)
    assert goodput.main(["4", "--turns", "2", "--networks", "digits", "--results", str(tmp_path)]) == code
    assert n_epochs == ["n_epochs=4", *["n_epochs=60"] * 4]
    text = (tmp_path / "goodput_digits.md").read_text()
    assert "| digits: goodput | 95.0% | target >= 0.92: pass |" in text
    assert "| digits: signals in 100 s | 5 |" in text
    assert "| digits: from a kill to the end of the next step, median | 0.60 s |" in text
    assert (
        "| digits: the same after SIGSTOP, less `timeout` of 1 s, median | 1.60 s | target <= 0.8: short |"
        in text
    )
    assert "| digits: 2 killed loaders started again alone, median | 0.20 s |" in text
    assert f"| digits: ends with the bits of the unbroken run | {'yes' if code == 0 else 'no'} |" in text
    assert "digits: goodput" in capsys.readouterr().out
