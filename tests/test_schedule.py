"""The learning rate of every epoch: tables, and what holds for any configuration."""

import pytest
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st

from lockstep.optim.schedules import learning_rate

TABLES = [
    ({"lr_policy": "cosine", "n_epochs": 4}, [1, 0.853553, 0.5, 0.146447]),
    ({"lr_policy": "polynomial", "n_epochs": 4}, [1, 0.75, 0.5, 0.25]),
    ({"lr_policy": "polynomial", "n_epochs": 4, "lr_power": 2}, [1, 0.5625, 0.25, 0.0625]),
    (
        {"lr_policy": "polynomial", "n_epochs": 5, "lr_power": 0.5},
        [1, 0.894427, 0.774597, 0.632456, 0.447214],
    ),
    ({"lr_policy": "step", "n_epochs": 6, "lr_step": [4], "warm_up_epochs": 3}, [0.1, 0.4, 0.7, 1, 0.1, 0.1]),
    ({"lr_policy": "cosine", "n_epochs": 6, "warm_up_epochs": 2}, [0.1, 0.55, 1, 0.853553, 0.5, 0.146447]),
]


@pytest.mark.parametrize(("values", "expected"), TABLES)
def test_rates_are_those_of_the_table(values: dict[str, object], expected: list[float]) -> None:
    config = make_config(learning_rate=2.0, **values)
    rates = [learning_rate(config, epoch, []) for epoch in range(1, len(expected) + 1)]
    assert rates == pytest.approx([2 * share for share in expected], abs=1e-5)


def test_auto_does_not_look_at_a_warm_up() -> None:
    """Errors stand still from the start; both epochs that are compared must have had the whole rate."""
    config = make_config(learning_rate=1.0, lr_policy="auto", n_epochs=30, warm_up_epochs=5)
    rates = [learning_rate(config, epoch, [0.5] * 29) for epoch in range(1, 16)]
    assert rates[:5] == pytest.approx([0.1, 0.28, 0.46, 0.64, 0.82])
    assert rates[5:] == pytest.approx([1] * 3 + [0.1] * 3 + [0.01] * 3 + [0.001])


configs = st.builds(
    make_config,
    learning_rate=st.floats(1e-4, 10),
    lr_policy=st.sampled_from(["step", "auto", "cosine", "polynomial"]),
    lr_power=st.floats(0.1, 4),
    lr_step=st.lists(st.integers(0, 50), unique=True, max_size=4).map(sorted),
    warm_up_epochs=st.integers(0, 9),
    n_epochs=st.integers(10, 60),
)
errors = st.lists(st.floats(0, 1), min_size=60, max_size=60)


@given(configs, errors)
def test_a_rate_rises_in_the_warm_up_then_only_falls_and_stays_above_0(config, errors) -> None:
    rates = [learning_rate(config, epoch, errors) for epoch in range(1, config.n_epochs + 1)]
    warm_up = config.warm_up_epochs
    assert all(0 < rate <= config.learning_rate for rate in rates)
    assert rates[:warm_up] == sorted(set(rates[:warm_up]))
    assert rates[warm_up:] == sorted(rates[warm_up:], reverse=True)


@given(configs, errors, st.integers(1, 60))
def test_a_rate_depends_on_the_past_only(config, errors, epoch) -> None:
    assert learning_rate(config, epoch, errors) == learning_rate(config, epoch, errors[: epoch - 1])
