"""`rand_color`: the components are those of the pixels, and the shifts have the paper's distribution."""

import numpy as np
import pytest
from conftest import make_config, make_folder

from lockstep.data import hkl
from lockstep.data.colours import draw_shifts, principal_components
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory):
    """Return a split of more than 32 files with mostly grey pixels, so its channels are correlated."""
    folder = make_folder(tmp_path_factory.mktemp("colours") / "set", n_train=50 * 32, size=8)
    random = np.random.default_rng(2)
    for path in sorted((folder / "train_hkl").iterdir()):
        grey = random.normal(128, 40, (32, 8, 8, 1)) + random.normal(0, (3, 6, 12), (32, 8, 8, 3))
        hkl.write(path, grey.clip(0, 255).astype(np.uint8))
    return open_dataset(make_config(data_folder=str(folder))).train


def test_components_are_eigenvectors_and_eigenvalues_of_the_pixels(split) -> None:
    chosen = np.unique(np.linspace(0, 49, 32).round().astype(int))
    pixels = np.concatenate([hkl.read(split.files[n].path).reshape(-1, 3) for n in chosen]) / 255
    covariance = np.cov(pixels.T, bias=True)
    components = principal_components(split) / 255
    values = np.linalg.norm(components, axis=1)
    assert values[0] > 10 * values[1] > 10 * values[2] > 0
    vectors = components / values[:, None]
    assert np.allclose(vectors @ vectors.T, np.eye(3))
    assert np.allclose(covariance, vectors.T @ np.diag(values) @ vectors)
    assert np.allclose(vectors[0], 3**-0.5, atol=0.02)  # grey


def test_shifts_have_the_papers_mean_and_spread_and_are_the_samples_own(split) -> None:
    components = principal_components(split)
    shifts = draw_shifts(3, 5, 0.1, components, 40_000).astype(np.float64)
    assert shifts.shape == (40_000, 3)
    expected = 0.1**2 * components.T @ components
    assert np.abs(shifts.mean(0)).max() < 0.03 * np.sqrt(expected.max())
    assert np.allclose(np.cov(shifts.T), expected, rtol=0.05)
    again, other = (draw_shifts(3, epoch, 0.1, components, 40_000) for epoch in (5, 6))
    assert (again == shifts).all() and not np.isclose(other, shifts).any(1).all()
    assert not np.isclose(draw_shifts(4, 5, 0.1, components, 40_000), shifts).any(1).all()


def test_strengths_that_can_not_be_are_refused() -> None:
    for value, words in ((-0.1, "rand_color must be at least 0, not -0.1"), ("much", "rand_color")):
        with pytest.raises(UserError, match=words):
            make_config(rand_color=value)
