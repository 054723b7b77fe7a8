"""The order of samples: every sample once, whatever the number of trainers, and shuffled as configured."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.sampling import EpochSamples, minibatches, share, steps_done

files = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple)
shuffles = st.sampled_from(["none", "batches", "blocks"])
blocks = st.integers(1, 50)
seeds = st.integers(0, 2**32)


@given(files, shuffles, blocks, seeds, st.integers(1, 100))
def test_an_epoch_holds_every_sample_once(file_rows, shuffle, block, seed, epoch) -> None:
    order = EpochSamples(file_rows, shuffle, block, seed, epoch)
    assert len(order) == sum(file_rows)
    assert sorted(order.samples(0, len(order))) == list(range(len(order)))


@given(files, shuffles, blocks, seeds, st.data())
def test_any_part_is_that_part_of_the_whole(file_rows, shuffle, block, seed, data) -> None:
    order = EpochSamples(file_rows, shuffle, block, seed, 1)
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order)))
    assert list(order.samples(start, stop)) == list(order.samples(0, len(order))[start:stop])
    assert sum(rows.count for rows in order.rows(start, stop)) == stop - start
    places = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=9))
    assert list(order.samples_at(np.array(places, int))) == [order.samples(0, len(order))[n] for n in places]


@given(files, shuffles, blocks, seeds)
def test_rows_and_samples_agree(file_rows, shuffle, block, seed) -> None:
    order = EpochSamples(file_rows, shuffle, block, seed, 1)
    starts = np.cumsum([0, *file_rows])
    expected = []
    for rows in order.rows(0, len(order)):
        assert rows.count > 0 and rows.first + rows.count <= file_rows[rows.file]
        expected += [starts[rows.file] + rows.first + row for row in range(rows.count)]
    assert list(order.samples(0, len(order))) == expected


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 5), st.data())
def test_shares_cut_every_minibatch_without_gap_or_overlap(n_samples, batch_size, n_trainers, data) -> None:
    position = data.draw(st.integers(0, n_samples))
    seen = []
    for start, stop in minibatches(n_samples, batch_size * n_trainers, position):
        shares = [share(start, stop, rank, n_trainers) for rank in range(n_trainers)]
        lengths = [last - first for first, last in shares]
        assert max(lengths) - min(lengths) <= 1 and max(lengths) <= batch_size
        for first, last in shares:
            seen += range(first, last)
    assert seen == list(range(position, n_samples))


@given(n_samples=st.integers(1, 300), size=st.integers(1, 50), data=st.data())
def test_steps_have_numbers_of_their_own_wherever_a_run_resumes(n_samples, size, data) -> None:
    begin = data.draw(st.integers(0, n_samples - 1))
    places = [(1, begin), *((1, stop) for _, stop in minibatches(n_samples, size, begin))]
    places += [(2, stop) for _, stop in minibatches(n_samples, size)]
    numbers = [steps_done(epoch, position, n_samples, size) for epoch, position in places]
    assert numbers == sorted(set(numbers))
    if begin % size == 0:
        assert numbers == list(range(begin // size, 2 * -(-n_samples // size) + 1))


def test_no_shuffling_keeps_the_order_of_the_files() -> None:
    assert list(EpochSamples((3, 2), "none", 1, 0, 1).samples(0, 5)) == [0, 1, 2, 3, 4]


def test_batches_keeps_each_file_together() -> None:
    order = EpochSamples((4,) * 50, "batches", 1, 0, 1)
    rows = order.rows(0, len(order))
    assert all((run.first, run.count) == (0, 4) for run in rows)
    assert [run.file for run in rows] != sorted(run.file for run in rows)


def test_a_minibatch_of_blocks_comes_from_several_files() -> None:
    order = EpochSamples((256,) * 20, "blocks", 16, 0, 1)
    rows = order.rows(0, 128)
    assert all(run.first % 16 == 0 and run.count == 16 for run in rows)
    assert len({run.file for run in rows}) > 3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(EpochSamples((64,) * 4, "blocks", 4, seed, epoch).samples(0, 256))

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2) != order(1, 1)
