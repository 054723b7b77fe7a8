"""The learning rate of every step: tables, torch's own schedules, and what holds for any configuration."""

import pytest
import torch
from conftest import make_config
from hypothesis import given, settings
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
    lr_step=st.lists(st.integers(0, 50), unique=True, max_size=4).map(sorted)
    | st.lists(st.floats(0.01, 0.99), unique=True, max_size=4).map(sorted),
    lr_update=st.sampled_from(["auto", "step", "epoch"]),
    warm_up_epochs=st.integers(0, 9).map(float),
    n_epochs=st.integers(10, 60),
)
errors = st.lists(st.floats(0, 1), min_size=60, max_size=60)


@given(configs, errors)
def test_a_rate_rises_in_the_warm_up_then_only_falls_and_stays_above_0(config, errors) -> None:
    rates = [learning_rate(config, epoch, errors) for epoch in range(1, config.n_epochs + 1)]
    warm_up = int(config.warm_up_epochs)
    assert all(0 < rate <= config.learning_rate for rate in rates)
    assert rates[:warm_up] == sorted(set(rates[:warm_up]))
    assert rates[warm_up:] == sorted(rates[warm_up:], reverse=True)


@given(configs, errors, st.integers(1, 60))
def test_a_rate_depends_on_the_past_only(config, errors, epoch) -> None:
    assert learning_rate(config, epoch, errors) == learning_rate(config, epoch, errors[: epoch - 1])


@given(configs, errors, st.integers(1, 4))
@settings(max_examples=30)
def test_a_rate_by_step_lies_between_those_of_its_epoch_and_the_next(config, errors, n_steps) -> None:
    """After the warm-up, for every policy."""
    for epoch in range(int(config.warm_up_epochs) + 1, config.n_epochs):
        rates = [learning_rate(config, epoch, errors, step / n_steps) for step in range(n_steps)]
        end = learning_rate(config, epoch + 1, errors)
        low, high = sorted((rates[0], end))
        assert all(low * (1 - 1e-9) <= rate <= high * (1 + 1e-9) for rate in rates)


@pytest.mark.parametrize("policy", ["step", "auto", "cosine", "polynomial", "one_cycle"])
def test_by_epoch_a_rate_stays_within_an_epoch(policy: str) -> None:
    values = {"lr_policy": policy, "lr_update": "epoch", "n_epochs": 10, "warm_up_epochs": 2.5}
    config = make_config(lr_step=[0.33, 0.66], **values)
    for epoch in range(1, 11):
        rates = {learning_rate(config, epoch, [0.5] * 10, share) for share in (0.0, 0.4, 0.99)}
        assert len(rates) == 1


def test_a_warm_up_may_end_within_an_epoch() -> None:
    config = make_config(learning_rate=2.0, lr_policy="step", lr_step=[5], warm_up_epochs=0.5)
    shares = [learning_rate(config, 1, [], share) / 2 for share in (0.0, 0.25, 0.5, 0.75)]
    assert shares == pytest.approx([0.1, 0.55, 1.0, 1.0])


def test_shares_of_the_run_fall_at_the_same_share_of_any_run() -> None:
    """0.55 x 20 is more than 11 in floating point; the fall still comes after epoch 11."""
    for n_epochs, after in ((20, (11, 16)), (40, (22, 32)), (16, (9, 13))):
        config = make_config(learning_rate=1.0, lr_policy="step", n_epochs=n_epochs)
        rates = [learning_rate(config, epoch, []) for epoch in range(1, n_epochs + 1)]
        expected = [0.1 ** ((epoch > after[0]) + (epoch > after[1])) for epoch in range(1, n_epochs + 1)]
        assert rates == pytest.approx(expected)


def test_a_step_policy_by_step_falls_within_an_epoch() -> None:
    config = make_config(learning_rate=1.0, lr_step=[0.25], lr_update="step", n_epochs=2, lr_gamma=0.5)
    assert [learning_rate(config, 1, [], share) for share in (0.0, 0.49, 0.5, 0.9)] == [1.0, 1.0, 0.5, 0.5]


def test_no_rate_falls_below_the_least() -> None:
    config = make_config(learning_rate=1.0, lr_step=[1, 2], min_lr=0.05, n_epochs=4)
    assert [learning_rate(config, epoch, []) for epoch in (1, 2, 3)] == pytest.approx([1.0, 0.1, 0.05])
    cosine = make_config(learning_rate=1.0, lr_policy="cosine", min_lr=0.05, n_epochs=4)
    assert learning_rate(cosine, 3, []) == pytest.approx(0.05 + 0.95 / 2)
    assert learning_rate(cosine, 4, [], 0.9999999) == pytest.approx(0.05)


def rates_of(schedule: torch.optim.lr_scheduler.LRScheduler, n_steps: int) -> list[float]:
    """Return the rates of torch's schedule in its steps."""
    rates = []
    for _ in range(n_steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_cosine_by_step_is_torchs() -> None:
    """Both start at the whole rate and reach the least one after the last of 40 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = rates_of(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.01), 40)
    config = make_config(learning_rate=0.4, min_lr=0.01, lr_policy="cosine", n_epochs=4)
    ours = [learning_rate(config, 1 + step // 10, [], step % 10 / 10) for step in range(40)]
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_one_cycle_is_torchs() -> None:
    """torch reaches its extremes one step earlier, so the curves are compared at 2,000 steps."""
    n_steps = 2_000
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    keys = {"total_steps": n_steps, "cycle_momentum": False, "final_div_factor": 1e4}
    theirs = rates_of(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, **keys), n_steps)
    config = make_config(learning_rate=0.4, lr_policy="one_cycle", n_epochs=10)
    ours = [learning_rate(config, 1 + step // 200, [], step % 200 / 200) for step in range(n_steps)]
    assert ours == pytest.approx(theirs, abs=0.4 * 3e-3)
    early = make_config(learning_rate=0.4, lr_policy="one_cycle", n_epochs=10, warm_up_epochs=1.0)
    assert learning_rate(early, 2, []) == pytest.approx(0.4)
