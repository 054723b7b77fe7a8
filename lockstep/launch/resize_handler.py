"""The launcher's side of `lockstep resize`: check a request, pause the trainers, resume on other devices."""

import dataclasses
import time
from contextlib import suppress
from pathlib import Path

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.config.rules import discarded_replicas, settle
from lockstep.errors import UserError
from lockstep.launch.checks import check_descriptors
from lockstep.launch.console import Console
from lockstep.launch.resize import Request, ResizeAnswer, answer, discard, is_waiting, read_request
from lockstep.runs.network_source import RunSources


class ResizeHandler:
    """The requests to one run, of which one at a time is carried out.

    Attributes:
        before: The configuration to return to if the run can't start on the other devices; None while no
            request is carried out.
        config: The configuration with the other devices.
    """

    def __init__(self, folder: Path, console: Console, sources: RunSources) -> None:
        self._folder, self._console, self._sources = folder, console, sources
        self._begin = 0.0
        self._is_open = True  # until the folder can't be written
        self.before: Config | None = None
        self.config: Config | None = None
        self._request: Request | None = self._read()  # from before this start: who asked may be gone
        self.refuse("it was asked before the run started. Ask again.")

    def is_asked(self, config: Config, retains: bool) -> bool:
        """Return whether the trainers are to pause for a request that can be carried out.

        Args:
            config: That of the present attempt.
            retains: Whether it makes memory checkpoints.
        """
        request = self._read() if self.before is None and self._is_open else None
        if request is None:
            return False
        self._request, self._begin = request, time.monotonic()
        try:
            self.config = resized(config, request, retains)
            if changed := self._sources.describe_change():
                raise UserError(f"{changed}. Restore it first.")
        except UserError as error:
            self.refuse(str(error))
            return False
        self.before = config
        self._answer("accepted", "the trainers finish their step")
        if not is_waiting(self._folder, request.number):
            self.refuse("the request was withdrawn, or can't be answered")
        return self.before is not None

    def refuse(self, reason: str) -> None:
        """Refuse the request that is being carried out, or that was read last."""
        if self._request:
            self._console.say(f"note: not resized: {reason}")
            self._console.log("resize_refused", {"reason": reason})
            self._answer("refused", reason)
        self._request = self.before = self.config = None

    def finish(self, step: int) -> None:
        """Answer that the run has resumed on the other devices, after its first step there.

        Args:
            step: The number of steps before it, from the start of the run.
        """
        assert self.before and self.config
        seconds, names = time.monotonic() - self._begin, ", ".join(self.config.devices)
        n_trainers = len(self.config.devices)
        text = f"resized: {n_trainers} trainer(s) on {names} from step {step + 1} on, after {seconds:.2f} s"
        if self.before.shares != self.config.shares:
            text += f"; shares are {self.config.shares} now: the list was for {len(self.before.devices)}"
        self._console.say(text)
        if note := discarded_replicas(self.before.rule, len(self.before.devices), self.config):
            self._console.say(f"note: {note}")
        event = {"devices": list(self.config.devices), "step": step, "seconds": round(seconds, 3)}
        self._console.log("resized", event)
        self._answer("done", text)
        self._request = self.before = self.config = None

    def _read(self) -> Request | None:
        """Return the request, and remove a malformed one. Without access to the folder, look no more."""
        try:
            return read_request(self._folder)
        except UserError as error:
            self._console.say(f"note: {error}")
        try:
            discard(self._folder)
        except UserError as error:
            self._give_up(error)
        return None

    def _give_up(self, error: UserError) -> None:
        self._is_open = False
        self._console.say(f"note: requests to resize this run can't be answered: {error}")

    def _answer(self, state: str, text: str) -> None:
        """Answer the request. If that fails, remove it, so that the command that waits ends."""
        assert self._request
        if not self._is_open:
            return
        given = ResizeAnswer(self._request.number, state, text)  # type: ignore[arg-type]
        try:
            answer(self._folder, given)
        except UserError as error:
            self._give_up(error)
            with suppress(UserError):
                discard(self._folder, given.number)


def resized(config: Config, request: Request, retains: bool) -> Config:
    """Return a run's configuration with the devices of a request.

    Args:
        retains: Whether the run makes memory checkpoints.

    Raises:
        UserError: The run can't be resized, or not to these devices.
    """
    if config.n_hosts > 1:
        raise UserError("a run on several hosts can't be resized: stop it, and resume it with other devices")
    if config.global_batch_size is None:
        raise UserError(
            "only a run with global_batch_size (or logical_ranks) stays the same training on other devices"
        )
    if not retains:
        raise UserError("it needs checkpoints in memory, and memory_checkpoint_seconds is null")
    names = request.devices or _changed(config.devices, request.change)
    names = devices.normalise(names)
    if names == config.devices:
        raise UserError(f"the run is on {', '.join(names)} already")
    devices.check(names)
    is_listed = not isinstance(config.shares, str)
    shares = "equal" if is_listed and len(names) != len(config.devices) else config.shares
    found, _ = settle(dataclasses.replace(config, devices=names, shares=shares))
    devices.check_keys(found)
    devices.check_sharing(found)
    check_descriptors(found)
    return found


def _changed(names: tuple[str, ...], change: int) -> tuple[str, ...]:
    """Return devices with some added or the last ones removed."""
    if len(names) + change < 1:
        raise UserError(f"{len(names)} trainer(s) and {change:+d} leave none")
    return names[:change] if change < 0 else names + devices.unused(names, change)
