"""Checkpoints of runs, to be compared bit for bit."""

import numpy as np
from conftest import Running
from safetensors.numpy import load_file


def tensors(running: Running, epoch: int) -> dict[str, np.ndarray]:
    """Return the tensors of the checkpoint after an epoch, by name."""
    return load_file(running.run_folder / "checkpoints" / f"epoch_{epoch:04d}.safetensors")


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
