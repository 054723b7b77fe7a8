"""The survey of datasets that are Python objects, in its own process before the run's others."""

import dataclasses
from importlib import import_module

from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.survey import Survey, make_survey, publish
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.processes import Processes
from lockstep.launch.status import StatusBoard

_NAME = "the survey of the datasets"


def with_survey(config: Config) -> tuple[Config, list[str]]:
    """Survey the datasets of `data` and publish the result to the run's processes.

    Returns:
        The configuration with `item_size` and `n_channels`, so that a resumed run has the same images, and
        notes for the user.

    Raises:
        UserError: A dataset or the network can't be used.
        PeerProblem: The process of the survey failed.
    """
    surveys: list[Survey] = []
    with Processes(config.timeout) as processes:
        processes.start(_NAME, "lockstep.launch.surveying:run_survey", (config,))
        exit_status = processes.watch(surveys.append)
    if exit_status.code == UserError.code:
        raise UserError(exit_status.message.removeprefix(f"{_NAME}: "))
    if exit_status.code:
        raise PeerProblem(_NAME, f"{exit_status.traceback}{exit_status.message}")
    (survey,) = surveys
    publish(survey)
    rows, columns, n_channels = survey.image_shape
    return dataclasses.replace(config, item_size=(rows, columns), n_channels=n_channels), list(survey.notes)


def run_survey(control: Pipe, board: StatusBoard, config: Config) -> None:
    """Send the launcher the survey. The network is made only if its size is needed."""
    if config.item_size is None:  # imports torch now, when the launcher grants time for imports
        import_module("lockstep.network.build")

    def input_size(n_channels: int, n_classes: int) -> tuple[int, int]:
        from lockstep.network.build import build_model, input_spec_of, sides_of

        if config.input_size is not None:
            return sides_of(config.input_size)
        board.say("building the network, whose size decides that of the images")
        with_channels = dataclasses.replace(config, n_channels=n_channels)
        return input_spec_of(build_model(with_channels, n_classes), with_channels).size

    board.say("loading the datasets")
    control.send(make_survey(config, input_size, board.say))
