"""The last trainer, how long the others wait and why: on synthetic times whose answer is known."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.messages import EpochTimes, RankTimes, Straggler
from lockstep.runs.stragglers import CAUSES, OTHER, PHASES, added, describe, measure, straggler_of

LOAD, COMPUTE, MEET, EXCHANGE = range(len(PHASES))


def times_of(busy: np.ndarray, between: np.ndarray | None = None) -> np.ndarray:
    """Return the times of trainers with barriers before and after the exchange, as a stopwatch has them.

    Args:
        busy: Seconds (trainers, steps, PHASES) of loading, computing and exchanging; those of MEET are 0.
        between: Seconds (trainers, steps) of work before a step that no phase counts.
    """
    times = busy.copy()
    arrival = busy[:, :, LOAD] + busy[:, :, COMPUTE] + (0 if between is None else between)
    for arrived in (arrival, busy[:, :, EXCHANGE]):
        times[:, :, MEET] += arrived.max(0) - arrived
    return times


def even(seed: int, n_ranks: int, n_steps: int, noise: float = 0.2) -> np.ndarray:
    """Return busy times of trainers that differ by noise only."""
    random = np.random.default_rng(seed)
    return np.array([0.02, 1.0, 0.0, 0.2]) * random.uniform(1 - noise, 1 + noise, (n_ranks, n_steps, 4))


@given(
    seed=st.integers(0, 2**32),
    n_ranks=st.integers(2, 9),
    n_steps=st.integers(12, 60),
    data=st.data(),
    phase=st.sampled_from([LOAD, COMPUTE, EXCHANGE]),
    delay=st.floats(0.6, 5.0),
)
def test_the_slow_trainer_and_its_phase_are_named(
    seed: int, n_ranks: int, n_steps: int, data: st.DataObject, phase: int, delay: float
) -> None:
    slow = data.draw(st.integers(0, n_ranks - 1))
    busy = even(seed, n_ranks, n_steps, noise=0.05)
    busy[slow, :, phase] += delay
    measured = measure(times_of(busy))
    found = measured.straggler
    assert found and (found.rank, found.cause) == (slow, PHASES[phase])
    assert found.last_share == 1.0
    assert measured.ranks[slow].waited == pytest.approx(n_steps * delay, rel=0.35)
    assert f"trainer {slow} last in 100% of steps, others wait " in describe(found)


@given(seed=st.integers(0, 2**32), n_ranks=st.integers(2, 9), n_steps=st.integers(12, 60))
def test_work_between_steps_is_no_phase(seed: int, n_ranks: int, n_steps: int) -> None:
    busy = even(seed, n_ranks, n_steps, noise=0.02)
    between = np.zeros((n_ranks, n_steps))
    between[0] = 1.0
    found = measure(times_of(busy, between)).straggler
    assert found and (found.rank, found.cause) == (0, OTHER)


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_even_trainers_are_not_named(n_ranks: int) -> None:
    """Noise of 20 % makes trainers wait for each other, but for none of them more than for the others."""
    named = [measure(times_of(even(seed, n_ranks, 40))).straggler for seed in range(200)]
    assert sum(each is not None for each in named) <= 2
    waits = [each.waited for each in measure(times_of(even(0, n_ranks, 40))).ranks]
    assert all(wait > 0 for wait in waits)  # so it is not for lack of waiting


def test_equal_trainers_and_a_lone_one_have_no_straggler() -> None:
    for n_ranks in (1, 2, 5):
        measured = measure(times_of(even(0, n_ranks, 30, noise=0.0)))
        assert measured.straggler is None and sum(each.waited for each in measured.ranks) == 0


@given(seed=st.integers(0, 2**32), n_ranks=st.integers(2, 6), n_steps=st.integers(1, 30), cut=st.data())
def test_sums_of_parts_are_those_of_the_whole(
    seed: int, n_ranks: int, n_steps: int, cut: st.DataObject
) -> None:
    times = times_of(even(seed, n_ranks, n_steps))
    whole = measure(times)
    assert sum(each.n_last for each in whole.ranks) == n_steps == whole.n_steps
    place = cut.draw(st.integers(0, n_steps))
    parts = [measure(part) for part in (times[:, :place], times[:, place:]) if part.shape[1]]
    sums = added(parts)
    assert sums.n_steps == whole.n_steps and sums.seconds == pytest.approx(whole.seconds)
    for ours, theirs in zip(sums.ranks, whole.ranks, strict=True):
        assert (ours.rank, ours.n_last) == (theirs.rank, theirs.n_last)
        assert ours.waited == pytest.approx(theirs.waited)
        assert ours.excess == pytest.approx(theirs.excess) and ours.seconds == pytest.approx(theirs.seconds)
    json.dumps(asdict(whole))  # plain numbers, as the log needs them


@given(seed=st.integers(0, 2**32), n_ranks=st.integers(2, 6), n_steps=st.integers(12, 40))
def test_the_order_of_the_ranks_does_not_matter(seed: int, n_ranks: int, n_steps: int) -> None:
    busy = even(seed, n_ranks, n_steps)
    busy[0, :, COMPUTE] += 2
    turned = np.roll(busy, 1, axis=0)
    ours, theirs = measure(times_of(busy)), measure(times_of(turned))
    assert [each.n_last for each in theirs.ranks] == list(np.roll([each.n_last for each in ours.ranks], 1))
    assert ours.straggler and theirs.straggler and (ours.straggler.rank, theirs.straggler.rank) == (0, 1)


def test_over_hosts_the_exchange_is_waiting() -> None:
    """Host 1's trainers wait for host 0 in the sum over the network, which is in their exchange."""
    busy = even(0, 4, 30, noise=0.01)
    busy[1, :, COMPUTE] += 1.0
    times = busy.copy()
    arrival = busy[:, :, LOAD] + busy[:, :, COMPUTE]
    for host in (slice(0, 2), slice(2, 4)):
        times[host, :, MEET] = arrival[host].max(0) - arrival[host]
        times[host, :, EXCHANGE] += arrival.max(0) - arrival[host].max(0)
    found = measure(times, n_hosts=2)
    assert found.straggler and (found.straggler.name, found.straggler.cause) == (
        "trainer 1 of host 0",
        "compute",
    )
    assert all(set(each.excess) == {"load-wait", "compute"} for each in found.ranks)
    within = measure(times)  # the waiting of host 1 is then taken for its own exchange
    assert not within.straggler or within.straggler.wait_share < found.straggler.wait_share / 2


def epoch_with(n_last: int, waited: float, n_steps: int = 100) -> EpochTimes:
    """Return steps of 1 s in which trainer 1 of two was last n_last times and was waited for."""
    excess = {"load-wait": 0.0, "compute": waited, "exchange": 0.0}
    seconds = {"load-wait": 0.0, "compute": n_steps - waited, "barrier": waited, "exchange": 0.0}
    fast = RankTimes(0, n_steps - n_last, 0.0, dict.fromkeys(excess, 0.0), seconds)
    slow = RankTimes(1, n_last, waited, excess, {**seconds, "compute": float(n_steps), "barrier": 0.0})
    return EpochTimes(1, n_steps, float(n_steps), [fast, slow])


@pytest.mark.parametrize(
    ("n_last", "waited", "is_new", "is_kept"),
    [
        (92, 31.0, True, True),
        (92, 4.0, False, True),  # below 5 %, above 3 %
        (92, 2.0, False, False),
        (60, 31.0, False, True),  # a coin shows heads 60 times of 100, too
        (45, 31.0, False, True),
        (35, 31.0, False, False),
    ],
)
def test_a_trainer_stays_named_below_the_limit_at_which_it_is_named(
    n_last: int, waited: float, is_new: bool, is_kept: bool
) -> None:
    times = epoch_with(n_last, waited)
    assert (straggler_of(times) is not None) == is_new
    assert (straggler_of(times, Straggler(1, "trainer 1", 0.9, 0.3, "compute")) is not None) == is_kept
    assert (straggler_of(times, Straggler(0, "trainer 0", 0.9, 0.3, "compute")) is not None) == is_new


def test_every_cause_has_its_usual_reasons_and_a_line_that_fits() -> None:
    assert set(CAUSES) == {*PHASES, OTHER} - {"barrier"}
    assert all(
        len(describe(Straggler(0, "trainer 15 of host 127", 1.0, 1.0, cause))) <= 98 for cause in CAUSES
    )
