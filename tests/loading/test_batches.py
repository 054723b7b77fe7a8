"""The .hkl reader and writer compared with hickle and h5py, and broken files."""

import os
from pathlib import Path

import h5py
import hickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.data import c01b, hkl
from lockstep.errors import UserError

GOLDEN = Path(__file__).parent.parent / "golden"


@settings(max_examples=40)
@given(
    array=arrays.arrays(
        st.sampled_from([np.uint8, np.int64, np.float32]), arrays.array_shapes(min_dims=1, max_dims=4)
    )
)
def test_what_is_written_reads_back_here_and_in_hickle(tmp_path_factory, array: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("hkl") / "a.hkl"
    hkl.write(path, array)
    for read in (hkl.read(path), hickle.load(path)):
        assert read.dtype == array.dtype and read.shape == array.shape
        assert read.tobytes() == array.tobytes()
    assert os.listdir(path.parent) == ["a.hkl"]


@given(first=st.integers(0, 20), count=st.integers(0, 20))
def test_any_rows_can_be_read(shared_folder: Path, first: int, count: int) -> None:
    path = shared_folder / "train_hkl" / "0000.hkl"
    array = hkl.inspect(path)
    first, count = min(first, array.shape[0]), min(count, array.shape[0] - first)
    out = np.full((max(count, 0), *array.row_shape), 99, np.uint8)
    hkl.read_rows(array, first, out)
    assert (out == hickle.load(path)[first : first + len(out)]).all()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.hkl")), ids=lambda path: path.stem)
def test_files_of_every_hickle_are_read_at_their_offset(path: Path) -> None:
    """The files were written by hickle 1.4, 2.0, 2.1, 3.4, 4.0 and 5.0."""
    array = np.arange(360).astype(np.uint8).reshape(3, 4, 5, 6)
    assert hkl.inspect(path).offset is not None
    assert (hkl.read(path) == array).all()
    images = np.empty((2, 4, 5, 3), np.uint8)
    hkl.read_rows(hkl.as_c01b(hkl.inspect(path)), 3, images)
    assert (images == array.transpose(3, 1, 2, 0)[3:5]).all()


def test_every_major_version_is_among_them() -> None:
    assert {path.stem[:7] for path in GOLDEN.glob("*.hkl")} == {f"hickle{major}" for major in range(1, 6)}


def structure(path: Path) -> dict[str, object]:
    """Return names, types and attributes of everything in an HDF5 file."""
    with h5py.File(path) as file:
        found: dict[str, object] = {"": [(name, str(value)) for name, value in sorted(file.attrs.items())]}
        file.visititems(
            lambda name, item: found.update({name: [(key, str(v)) for key, v in item.attrs.items()]})
        )
        return found


def test_what_we_write_for_hickle_2_is_laid_out_as_its_own(tmp_path: Path) -> None:
    hkl.write_hickle2(tmp_path / "a.hkl", hkl.read(GOLDEN / "hickle2.hkl"))
    assert structure(tmp_path / "a.hkl") == structure(GOLDEN / "hickle2.hkl")
    assert (hkl.read(tmp_path / "a.hkl") == hkl.read(GOLDEN / "hickle2.hkl")).all()


def test_what_we_write_is_laid_out_as_hickle_5s_own(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    hkl.write(tmp_path / "a.hkl", array)
    hickle.dump(array, tmp_path / "b.hkl", mode="w")
    assert structure(tmp_path / "a.hkl") == structure(tmp_path / "b.hkl")
    pickles = []
    for name in ("a.hkl", "b.hkl"):
        with h5py.File(tmp_path / name) as file:
            pickles.append(file["hickle_types_table/0"][()].tobytes())
    assert pickles[0] == pickles[1]


@settings(max_examples=60)
@given(data=st.data())
def test_any_images_of_any_c01b_batch(tmp_path_factory, data: st.DataObject) -> None:
    """Contiguous, chunked and compressed files equal NumPy's transpose."""
    height, width, batch = (data.draw(st.integers(1, n)) for n in (40, 40, 9))
    stored = np.random.default_rng(height).integers(0, 256, (3, height, width, batch), dtype=np.uint8)
    path = tmp_path_factory.mktemp("hkl") / "a.hkl"
    write_old(path, stored, **data.draw(st.sampled_from([{}, {"chunks": True}, {"compression": "gzip"}])))
    first = data.draw(st.integers(0, batch))
    out = np.full((data.draw(st.integers(0, batch - first)), height, width, 3), 99, np.uint8)
    hkl.read_rows(hkl.as_c01b(hkl.inspect(path)), first, out)
    assert (out == stored.transpose(3, 1, 2, 0)[first : first + len(out)]).all()
    assert (c01b.from_b01c(np.ascontiguousarray(stored.transpose(3, 1, 2, 0))) == stored).all()


def write_old(path: Path, array: np.ndarray, **options: object) -> None:
    """Write an array as hickle 4 does, without pickles."""
    with h5py.File(path, "w") as file:
        file.attrs["HICKLE_VERSION"] = "4.0.0"
        file.create_dataset("data", data=array, **options)


@pytest.mark.parametrize("options", [{"chunks": (1, 2, 2, 3)}, {"compression": "gzip"}])
def test_chunked_and_compressed_files_are_read_through_hdf5(tmp_path: Path, options: dict) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(5, 2, 2, 3)
    write_old(tmp_path / "a.hkl", array, **options)
    assert hkl.inspect(tmp_path / "a.hkl").offset is None
    assert (hkl.read(tmp_path / "a.hkl") == array).all()


def test_foreign_byte_order_is_converted(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4)
    write_old(tmp_path / "a.hkl", array)
    assert (hkl.read(tmp_path / "a.hkl") == array).all()


@given(data=st.data())
@settings(max_examples=60)
def test_truncated_and_damaged_headers_are_named_errors(tmp_path_factory, data: st.DataObject) -> None:
    """A damaged file gives a UserError with its name, or an array; never a crash or another exception."""
    path = tmp_path_factory.mktemp("hkl") / "bad.hkl"
    hkl.write(path, np.zeros((4, 8, 8, 3), np.uint8))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "truncate"):
        del content[data.draw(st.integers(0, len(content) - 1), "length") :]
    else:
        place = data.draw(st.integers(0, 6143), "place")
        content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8), "bytes")
    path.write_bytes(content)
    try:
        hkl.read(path)
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("content", [b"", b"not hdf5 at all", os.urandom(4096)])
def test_other_files_are_named_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.hkl").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.hkl: is not a whole .hkl"):
        hkl.inspect(tmp_path / "a.hkl")


def test_a_file_that_changes_after_it_was_inspected_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.hkl"
    hkl.write(path, np.zeros((4, 8, 8, 3), np.uint8))
    array = hkl.inspect(path)
    os.truncate(path, array.offset + 100)
    with pytest.raises(UserError, match=r"a\.hkl: can't be read: it was changed after"):
        hkl.read_rows(array, 0, np.empty(array.shape, np.uint8))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    hickle.dump({"a": 1}, tmp_path / "a.hkl")
    with pytest.raises(UserError, match="must hold one array"):
        hkl.inspect(tmp_path / "a.hkl")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.hkl"
    hkl.write(path, np.zeros(3))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(h5py.Group, "create_dataset", fail)
    with pytest.raises(OSError, match="disk full"):
        hkl.write(path, np.ones(3))
    assert (hkl.read(path) == 0).all() and os.listdir(tmp_path) == ["a.hkl"]
