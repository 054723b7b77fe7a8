"""Our .hkl reader and writer against hickle, h5py, and broken files."""

import os
from pathlib import Path

import h5py
import hickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep import batches
from lockstep.errors import UserError


@settings(max_examples=40)
@given(
    array=arrays.arrays(
        st.sampled_from([np.uint8, np.int64, np.float32]), arrays.array_shapes(min_dims=1, max_dims=4)
    )
)
def test_what_is_written_reads_back_here_and_in_hickle(tmp_path_factory, array: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("hkl") / "a.hkl"
    batches.write(path, array)
    for read in (batches.read(path), hickle.load(path)):
        assert read.dtype == array.dtype and read.shape == array.shape
        assert read.tobytes() == array.tobytes()
    assert os.listdir(path.parent) == ["a.hkl"]


@given(first=st.integers(0, 20), count=st.integers(0, 20))
def test_any_rows_can_be_read(shared_folder: Path, first: int, count: int) -> None:
    path = shared_folder / "train_hkl" / "0000.hkl"
    array = batches.inspect(path)
    first, count = min(first, array.shape[0]), min(count, array.shape[0] - first)
    out = np.full((max(count, 0), *array.row_shape), 99, np.uint8)
    batches.read_rows(array, first, out)
    assert (out == hickle.load(path)[first : first + len(out)]).all()


def write_version(path: Path, version: int, array: np.ndarray, **options: object) -> None:
    """An array as each major version of hickle laid it down, pickles left out."""
    with h5py.File(path, "w") as file:
        name = "data_0" if version in (2, 3) else "data"
        file.create_dataset(name, data=array, **options)
        if version == 1:
            file.create_dataset("type", data=[b"ndarray"])
        elif version in (2, 3):
            file.attrs["CLASS"], file.attrs["VERSION"] = b"hickle", version
            file[name].attrs["type"] = [b"ndarray"]
        else:
            file.attrs["HICKLE_VERSION"] = f"{version}.0.0"
            file.create_group("hickle_types_table")


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_files_of_every_hickle_are_read_at_their_offset(tmp_path: Path, version: int) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(5, 2, 2, 3)
    write_version(tmp_path / "a.hkl", version, array)
    assert batches.inspect(tmp_path / "a.hkl").offset is not None
    assert (batches.read(tmp_path / "a.hkl") == array).all()


@pytest.mark.parametrize("options", [{"chunks": (1, 2, 2, 3)}, {"compression": "gzip"}])
def test_chunked_and_compressed_files_are_read_through_hdf5(tmp_path: Path, options: dict) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(5, 2, 2, 3)
    write_version(tmp_path / "a.hkl", 4, array, **options)
    assert batches.inspect(tmp_path / "a.hkl").offset is None
    assert (batches.read(tmp_path / "a.hkl") == array).all()


def test_foreign_byte_order_is_converted(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4)
    write_version(tmp_path / "a.hkl", 4, array)
    assert (batches.read(tmp_path / "a.hkl") == array).all()


@given(data=st.data())
@settings(max_examples=60)
def test_truncated_and_damaged_headers_are_named_errors(tmp_path_factory, data: st.DataObject) -> None:
    """A damaged file gives a UserError with its name, or an array; never a crash or another exception."""
    path = tmp_path_factory.mktemp("hkl") / "bad.hkl"
    batches.write(path, np.zeros((4, 8, 8, 3), np.uint8))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "truncate"):
        del content[data.draw(st.integers(0, len(content) - 1), "length") :]
    else:
        place = data.draw(st.integers(0, 6143), "place")
        content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8), "bytes")
    path.write_bytes(content)
    try:
        batches.read(path)
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("content", [b"", b"not hdf5 at all", os.urandom(4096)])
def test_other_files_are_named_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.hkl").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.hkl: is not a whole .hkl"):
        batches.inspect(tmp_path / "a.hkl")


def test_a_file_that_changes_after_it_was_inspected_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.hkl"
    batches.write(path, np.zeros((4, 8, 8, 3), np.uint8))
    array = batches.inspect(path)
    os.truncate(path, array.offset + 100)
    with pytest.raises(UserError, match=r"a\.hkl: can't be read: it was changed after"):
        batches.read_rows(array, 0, np.empty(array.shape, np.uint8))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    hickle.dump({"a": 1}, tmp_path / "a.hkl")
    with pytest.raises(UserError, match="must hold one array"):
        batches.inspect(tmp_path / "a.hkl")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.hkl"
    batches.write(path, np.zeros(3))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(hickle, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        batches.write(path, np.ones(3))
    assert (batches.read(path) == 0).all() and os.listdir(tmp_path) == ["a.hkl"]
