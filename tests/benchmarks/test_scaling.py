"""The prediction of steps on many devices (benchmarks/hosts/scaling.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hosts.scaling import (
    FullLayer,
    Link,
    Stage,
    Wire,
    factors_of_hosts,
    lone_step,
    speed_up,
    step_after,
    step_beneath,
    sum_of_hosts,
)
from benchmarks.simulate import GPU_BATCH, gpu_curves, gpu_stages

seconds = st.floats(1e-6, 1.0)
stages_of = st.lists(
    st.builds(Stage, st.just("x"), seconds, seconds, st.integers(0, 10**9)), min_size=1, max_size=8
)
links = st.builds(Link, st.just("x"), st.floats(1e8, 1e12), st.floats(0, 1e-3), st.just(""))


def test_a_step_is_its_parts() -> None:
    stages = [Stage("first", 1.0, 2.0, 10), Stage("last", 3.0, 4.0, 30)]
    link = Link("one byte a second", 1.0, 0.25, "")
    assert lone_step(stages, 0.5) == 10.5
    assert step_after(stages, 0.5, link, 1, 8) == step_beneath(stages, 0.5, link, 1, 8) == 10.5
    assert step_after(stages, 0.5, link, 4, 8) == 10.5 + 1.5 * 320 + 4 * 0.25
    fast = Link("ten bytes a second", 10.0, 0.0, "")
    # the last stage's 30 bytes travel from 8 s to 11 s; the first one's backward pass ends at 10 s
    assert step_beneath(stages, 0.5, fast, 2, 1) == 8 + 3 + 1 + 0.5


@given(stages_of, seconds, links, st.integers(1, 512), st.integers(1, 8))
def test_overlap_saves_time_and_nothing_is_faster_than_n_times(
    stages: list[Stage], update: float, link: Link, n: int, parameter_bytes: int
) -> None:
    link = Link(link.name, link.bytes_per_second, 0.0, "")
    lone = lone_step(stages, update)
    beneath = step_beneath(stages, update, link, n, parameter_bytes)
    after = step_after(stages, update, link, n, parameter_bytes)
    assert lone <= beneath * (1 + 1e-9) and beneath <= after * (1 + 1e-9)
    assert 0 < speed_up(after, lone, n) <= n * (1 + 1e-9)


def test_hosts_send_sums_or_rows() -> None:
    link, wire = Link("one byte a second", 1.0, 0.25, ""), Wire("two bytes", 2.0, 0.5)
    assert sum_of_hosts(link, 2, 40, wire) == 2 * 0.5 * 80 + 2 * 0.25
    assert sum_of_hosts(link, 2, 40, Wire("slow", 2.0, 3.0)) == 3.0 * 40  # packing continues meanwhile
    layer = FullLayer(10, 20)
    assert layer.has_short_factors(6, 2) and not layer.has_short_factors(7, 2)
    assert factors_of_hosts(link, 2, 240, [layer], 7, wire) == sum_of_hosts(link, 2, 240, wire)
    rows = 4 * 6 * (10 + 20) + 0.25
    assert factors_of_hosts(link, 2, 240, [layer], 6, wire) == sum_of_hosts(link, 2, 40, wire) + rows
    more = factors_of_hosts(link, 3, 240, [layer], 4, wire, 0.01) - factors_of_hosts(
        link, 3, 240, [layer], 4, wire
    )
    assert more == pytest.approx(2 * 4 * 200 * 0.01)


def test_gpus_take_the_rooflines_seconds() -> None:
    assert GPU_BATCH / lone_step(gpu_stages(1.0), 0.0) == pytest.approx(129_000, rel=0.01)
    curves = gpu_curves()
    assert all(curve[1] == pytest.approx(1) and curve[512] > curve[64] for curve in curves.values())
