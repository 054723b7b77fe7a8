"""The keys of augmentation: what is refused, with which words, and what needs the loader's images."""

import re
from typing import Any

import pytest
from conftest import make_config

from lockstep.config import read_command_line, resolve
from lockstep.config.augmentation import (
    crop_args_of,
    crop_of,
    device_changes,
    jitter_of,
    makes_images,
    mixes,
)
from lockstep.errors import UserError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("crop=random_resize", "(did you mean 'random_resized'?)"),
        ("auto_augment=trivia", "(did you mean 'trivial'?)"),
        ("crop=padded crop_args={pading: 2}", "crop: padded has no pading (did you mean 'padding'?)"),
        ("crop=padded crop_args={padding: 0}", "padding must be at least 1 pixel, not 0"),
        ("crop=padded crop_args={padding: 1001}", "padding must be at most 1000 pixels, not 1001"),
        ("crop=padded crop_args={mode: refect}", "mode must be 'zero' or 'reflect', not 'refect'"),
        ("crop_args={scale: [0.1, 1]}", "crop: random has no scale (it has none)"),
        (
            "crop=random_resized crop_args={scale: [0.5, 0.1]}",
            "scale must be two numbers above 0, the smaller",
        ),
        ("crop=random_resized crop_args={scale: [0.5, 2]}", "scale must be at most 1, the whole image"),
        ("crop=random_resized crop_args={ratio: 1}", "ratio must be a list, each item a number, not 1"),
        ("rand_crop=false crop=padded", "crop padded contradicts rand_crop: false. Remove one of them."),
        ("auto_augment_args={n: 2}", "auto_augment: null has no n (it has none)"),
        (
            "auto_augment=trivial auto_augment_args={n: 2}",
            "auto_augment: trivial has no n (it has: bins)",
        ),
        ("auto_augment=rand auto_augment_args={magnitude: 31}", "magnitude must be below bins, 31, not 31"),
        ("auto_augment=rand auto_augment_args={magnitud: 3}", "has no magnitud (did you mean 'magnitude'?)"),
        ("auto_augment=rand auto_augment_args={n: 0}", "n must be at least 1, not 0"),
        ("auto_augment=trivial auto_augment_args={bins: 1}", "bins must be at least 2, not 1"),
        ("auto_augment=trivial auto_augment_args={bins: 256}", "bins must be at most 255, not 256"),
        ("color_jitter=[0.4, 0.4]", "color_jitter as a list has 3 or 4 numbers, for brightness, contrast"),
        ("color_jitter=-1", "color_jitter must be at least 0, not -1.0"),
        ("color_jitter=[0.4, 0.4, 0.4, 0.6]", "color_jitter can turn hues by at most 0.5, not 0.6"),
        ("random_erasing=1.1", "random_erasing must be at most 1, not 1.1"),
        ("rotate=181", "rotate must be at most 180, not 181"),
        ("mixup=-0.1", "mixup must be at least 0, not -0.1"),
        ("cutmix=.nan", "cutmix must be at least 0, not nan"),
        ("mixup=1 mix_prob=2", "mix_prob must be at most 1, not 2"),
        ("mix_prob=0.5", "mix_prob needs mixup or cutmix above 0"),
        ("mix_off_epoch=3", "mix_off_epoch needs mixup or cutmix above 0"),
        ("augmentation=cutout", "augmentation must be of the form package.module:function, not 'cutout'"),
        ("augmentation=a:b.c", "must be of the form package.module:function"),
        ("crop=padded subtract_mean=image", "subtract_mean image has a place for whole images only"),
    ],
)
def test_errors_name_key_and_remedy(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([read_command_line(re.split(r" (?=\w+=)", words))])
    assert message in str(caught.value) and str(caught.value).startswith("command line")


def test_crops_are_those_of_rand_crop_unless_they_are_named() -> None:
    assert crop_of(make_config()) == "random"
    assert crop_of(make_config(rand_crop=False)) == "center"
    assert crop_of(make_config(rand_crop=True, crop="center")) == "center"
    assert crop_args_of(make_config(crop="padded", crop_args={"padding": 2})) == {
        "padding": 2,
        "mode": "zero",
    }


def test_only_new_keys_have_the_loader_make_images() -> None:
    for values in (
        {},
        {"crop": "random"},
        {"crop": "center"},
        {"rand_color": 0.1},
        {"mixup": 1, "mix_prob": 0},
    ):
        assert not makes_images(make_config(**values)), values
    for values in (
        {"crop": "padded"},
        {"crop": "random_resized"},
        {"rotate": 1},
        {"color_jitter": [0, 0, 0, 0.1]},
        {"auto_augment": "rand"},
        {"random_erasing": 0.1},
        {"cutmix": 1},
        {"augmentation": "a:b"},
    ):
        assert makes_images(make_config(**values)), values
    assert mixes(make_config(cutmix=1)) and not mixes(make_config(crop="padded"))
    assert jitter_of(make_config(color_jitter=0.4)) == (0.4, 0.4, 0.4, 0.0)
    assert jitter_of(make_config(color_jitter=[0.1, 0.2, 0.3])) == (0.1, 0.2, 0.3, 0.0)


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({}, None),
        ({"crop": "center", "rand_color": 0.1}, None),
        ({"crop": "random_resized"}, "crop"),
        ({"crop": "padded", "color_jitter": 0.1}, "crop, color jitter"),
        ({"mixup": 0.2, "random_erasing": 0.1}, "crop, erasing, mixing"),
        ({"auto_augment": "trivial"}, None),
        ({"rotate": 5.0, "color_jitter": 0.4, "cutmix": 1.0}, "mixing"),
        ({"augmentation": "mine:f", "crop": "random_resized", "random_erasing": 0.1}, "erasing"),
        ({"crop": "random_resized", "cutmix": 1.0, "augment_on": "cores"}, None),
    ],
)
def test_kernels_make_what_comes_behind_the_last_change_that_only_cores_make(
    values: dict[str, Any], made: str | None
) -> None:
    changes = device_changes(make_config(**values))
    assert (changes and str(changes)) == made
