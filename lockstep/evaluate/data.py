"""The data on which a trained network is validated, compared with the data of its run."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.config import Config
from lockstep.data.dataset import Dataset, as_subtracted, open_dataset, takes_mean_of_data, with_mean
from lockstep.runs.dataset_description import MEAN_NAME, check_same_classes, read_description


def open_data(
    config: Config, run: Path, checkpoint: str, own_mean: bool = False
) -> tuple[Dataset, list[str]]:
    """Open a configuration's dataset for the network of a run, with the mean of the run's training data.

    The mean is the dataset's own if `subtract_mean` gives one, or if the run's is a whole image of another
    shape.

    Args:
        config: The run's configuration; its keys of data may be overridden.
        run: The run's folder.
        checkpoint: The name of the checkpoint to validate.
        own_mean: Whether to subtract the dataset's own mean, as `mean_file` names it, in any case.

    Returns:
        The dataset and notes for the user.

    Raises:
        UserError: A file can't be used, or a class has another name than in the run.
    """
    dataset = open_dataset(config)
    description = read_description(run, checkpoint)
    if description is None:
        return dataset, []
    name = config.data or config.data_folder
    check_same_classes(dataset.class_names, name, description, run)
    if own_mean or not takes_mean_of_data(config):
        return dataset, []
    mean = as_subtracted(config, description.mean)
    if mean.shape != dataset.image_shape:
        if mean.shape[2] == dataset.image_shape[2] and _is_of_channels(mean):
            return with_mean(dataset, tuple(mean[0, 0])), []
        shapes = [" x ".join(map(str, each.image_shape)) for each in (description, dataset)]
        note = f"{run / MEAN_NAME}: is for images of {shapes[0]}, and those of {name} are {shapes[1]}: "
        return dataset, [f"{note}a network without a mean of its own gets the mean of {name}"]
    return replace(dataset, mean=mean), []


def _is_of_channels(mean: np.ndarray) -> bool:
    """Return whether a mean image has one number for each channel, and so fits images of any size."""
    return mean.size > 0 and bool((mean == mean[0, 0]).all())
