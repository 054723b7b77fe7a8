"""The name of a checkpoint, and what is read from it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runs.state import State, position_of

COUNTS = st.integers(0, (1 << 63) - 1)


@given(COUNTS.filter(bool), COUNTS, COUNTS, st.booleans(), st.sampled_from([{}, {"val_freq": 2}]))
def test_a_checkpoints_name_has_its_epoch_and_position(
    epoch: int, position: int, n_samples: int, is_validated: bool, config: dict[str, int]
) -> None:
    validated = [{"epoch": epoch, "error_top1": 0.5}] if is_validated else []
    state = State(epoch, position, n_samples, 0.1, validated, 1, config, {})
    assert position_of(state.name) == (epoch, math.inf if state.is_complete else position)


@pytest.mark.parametrize("name", ["", "latest", ".epoch_0001", "epoch_0001_at_", "epoch_0001.json"])
def test_other_names_have_no_position(name: str) -> None:
    assert position_of(name) is None
