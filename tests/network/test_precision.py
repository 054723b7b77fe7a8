"""The switches that `precision` sets, and the warning for processors without instructions for bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import make_config

from lockstep.backends import devices
from lockstep.network import low_precision


@pytest.fixture
def switches() -> Iterator[None]:
    """Restore torch's switches after the test."""
    yield
    low_precision.configure(make_config(precision="fp32", deterministic=False))


@pytest.mark.parametrize("name", ["tf32", "fp32", "bf16", "tf32"])
def test_the_older_switch_agrees_so_that_torch_compile_can_read_it(switches: None, name: str) -> None:
    """torch raises an error where its two interfaces differ, and Inductor reads the older one."""
    low_precision.configure(make_config(precision=name, deterministic=False))
    assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if name == "tf32" else "ieee")
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
    assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
    with torch.backends.cudnn.flags(enabled=False):  # as networks do for a double backward pass
        pass


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
