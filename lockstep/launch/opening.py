"""What a launcher makes sure of before it starts processes: nothing that was given can't be used."""

from pathlib import Path

from lockstep.config import Config
from lockstep.data.dataset import Dataset, check_content, open_dataset
from lockstep.launch import scalars
from lockstep.launch.commandline import Words, settle_config
from lockstep.launch.console import show
from lockstep.launch.hosting import Alone
from lockstep.launch.models import check_model
from lockstep.runs.folder import Run


def open_all(words: Words, models: Path, others: Alone) -> tuple[Config, Dataset, Run]:
    """The settled configuration, the dataset, and the run's folder. models: the folder of network files.

    Raises UserError for what can't be used, HostFailed where another host has ended.
    """
    brought = others.bring_checkpoint(words.config)
    config, notices = settle_config(words)
    for notice in [*brought, *notices]:
        show(f"note: {notice}", "stdout")
    check_model(config, models)
    dataset = open_dataset(config)
    if config.check_sums:
        check_content(dataset)
    if config.tensorboard:
        scalars.check_installed()
    others.agree(config, dataset)
    return config, dataset, others.open_run(config, len(dataset.train))
