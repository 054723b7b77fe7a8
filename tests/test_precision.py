"""`precision: bf16` on a processor that has no instructions for it is said, with what it costs."""

from pathlib import Path

import pytest
from conftest import make_config

from lockstep.backends import devices


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", ""),
        ("Features\t: fp asimd bf16", ""),
        ("flags\t\t: fpu avx2 avx512f", "1.3 times"),
        ("flags\t\t: fpu avx2", "5 times"),
        ("processor\t: 0", ""),
    ],
)
def test_bf16_without_instructions_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "cpuinfo")
    (found,) = devices.notices_of_keys(make_config(precision="bf16")) or [""]
    assert (words in found) if words else found == ""
    assert devices.notices_of_keys(make_config(precision="fp32")) == []
    assert devices.notices_of_keys(make_config(precision="bf16", devices=["cuda:0"])) == []
