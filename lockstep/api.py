"""Training from Python: `lockstep.train`, `lockstep.resume`, and the run that they return.

A run is the program that `lockstep train` starts, in its own process, so that its trainers never import
the caller's file and its results have the same bits. This module starts it, passes its events on, and reads
what it leaves in its folder.
"""

import heapq
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from tqdm import tqdm

from lockstep import objects
from lockstep.config import read_run, read_yaml, resolve
from lockstep.config.hosts import torchrun_keys
from lockstep.config.tasks import MONITORED, monitor_of
from lockstep.errors import UserError
from lockstep.files import parse_event, program_folder
from lockstep.launch import child_main
from lockstep.launch.commandline import default_config
from lockstep.launch.console import SEND_BAR, BarState, ProgressBar, read_bar_line
from lockstep.objects import Kind
from lockstep.runs.checkpoint_files import check_epoch, find_checkpoint, read_state, records
from lockstep.runs.folder import folder_after, log_name, logs_of, make_folder_named_by_time, newest
from lockstep.runs.metrics import best_epoch, has_ended
from lockstep.signals import die_with_parent

if TYPE_CHECKING:
    from torch import nn

Event = dict[str, Any]
Callback = Callable[[Event], object]
_LOOK_SECONDS = 0.05  # between looks at the log
_STOPPED = (130, 143)  # exit statuses of a run that was asked to stop
_RECORDS = ("progress", "validated")  # events that a callback gets


class RunFailed(RuntimeError):
    """A run ended early; the message is its last line, which names the process that failed."""


class Run:
    """The results of a run, read from its folder.

    Attributes:
        folder: The run's folder, as an absolute path.
        complete: True if all epochs were trained, or `patience` ended the run.
    """

    def __init__(
        self, folder: str | Path, complete: bool | None = None, passed: Mapping[Kind, Any] | None = None
    ) -> None:
        self.folder = Path(folder).absolute()
        self.complete = _is_complete(self.folder) if complete is None else complete
        self._passed = dict(passed or {})  # the network and datasets that are no names

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, complete={self.complete})"

    @property
    def history(self) -> list[Event]:
        """One record for each validated epoch: epoch, loss, errors, n_images, seconds, metrics by class.

        A run that resumed from an older checkpoint has taken back the epochs after it.
        """
        found: list[Event] = []
        # A host may have had several numbers. Times are compared as text, as damaged ones may be anything.
        logs = [[event for event, _ in _events(log, 0)] for log in logs_of(self.folder)]
        for event in heapq.merge(*logs, key=lambda event: str(event.get("time"))):
            if event["event"] not in _RECORDS or not isinstance(event.get("epoch"), int):
                continue
            while found and found[-1]["epoch"] >= event["epoch"]:
                found.pop()
            if event["event"] == "validated":
                found.append(event)
        return found

    @property
    def best(self) -> Event:
        """The record of the epoch that is best by the key `monitor`; of several, the earliest.

        Raises:
            UserError: No epoch has been validated yet.
        """
        history = self.history
        if not history:
            raise UserError(f"{self.folder}: no epoch is complete yet. Resume the run.")
        config, _ = resolve([read_run(self.folder / "config.yaml")])
        values = [{**record.get("means", {}), **record} for record in history]
        best = best_epoch(values, monitor_of(config)) or best_epoch(values, MONITORED[config.task][0])
        return next(record for record in history if record["epoch"] == best)

    def checkpoint(self, epoch: int | str = "latest") -> Path:
        """Return the file of tensors that `model` and `predict` use with the same `epoch`.

        Raises:
            UserError: There is no such checkpoint.
        """
        return find_checkpoint(self.folder, epoch)[0].path

    def model(self, epoch: int | str = "latest") -> "nn.Module":
        """Return the network of a checkpoint on the CPU, in evaluation mode.

        Args:
            epoch: The checkpoint's epoch, "best" (by the key `monitor`) or "latest" (the newest whole one).

        Raises:
            UserError: There is no whole checkpoint, or the network cannot be built.
        """
        import torch  # a program that only trains needs no torch of its own

        from lockstep.export.__main__ import load_trained

        if str(program_folder()) not in sys.path:  # its networks come after everything of the caller's
            sys.path.append(str(program_folder()))
        # The caller may have another default device, such as meta, where weights are lost.
        with objects.available(self._passed), torch.device("cpu"):
            return load_trained(self.folder, epoch).model

    def predict(
        self, image: str | Path, epoch: int | str = "latest", threshold: float | None = None
    ) -> list[tuple[str, float]]:
        """Return the most probable classes of an image file and their probabilities, best first.

        Args:
            image: The file.
            epoch: As of `model`.
            threshold: With `task: multilabel`, the least probability of the classes to return; by default
                the key `threshold` of the run.

        Raises:
            UserError: The file or the run's checkpoint cannot be used.
        """
        check_epoch(epoch)
        if not isinstance(image, str | os.PathLike):
            raise UserError(f"image: must be the path of an image file, not {image!r:.100}")
        if Path(image).is_dir():
            raise UserError(f"{image}: is a folder. Name one image; `lockstep predict` takes folders.")
        command = ["predict", "--run", str(self.folder), "--epoch", str(epoch), "--json"]
        command += [] if threshold is None else ["--threshold", str(threshold)]
        command += ["--", str(image)]
        with objects.pickled(self._passed) as passed:
            environment = _environment() | passed
            done = subprocess.run(_command(command), capture_output=True, text=True, env=environment)
        if done.returncode:
            raise UserError(_without_name(_last_line(done.stderr)))
        answers = json.loads(done.stdout.splitlines()[-1])["answers"]
        return [(answer["class"], answer["probability"]) for answer in answers]


def train(
    data_folder: str | Path | None = None,
    *,
    model: str | type | Callable[..., Any] | None = None,
    train_data: Any = None,
    val_data: Any = None,
    callback: Callback | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Train a network, as `lockstep train` with the same keys does.

    Args:
        data_folder: A folder of images, or a dataset folder; None: that of the configuration.
        model: A name (docs/models.md), or an nn.Module class or a function that makes one. Either is called
            with the number of classes and `model_args`.
        train_data: A dataset instead of a folder: any object with a length and items (image, label), see
            docs/datasets.md.
        val_data: The dataset to validate on, with `train_data`.
        callback: Called with every progress and validation record, in the caller's thread. If it returns
            "stop", the run stops as after Ctrl-C.
        quiet: Show nothing.
        **keys: Any key of the configuration (docs/configuration.md).

    Returns:
        The run. After KeyboardInterrupt or a callback's "stop" its `complete` is False.

    Raises:
        UserError: A key, file, object or device cannot be used.
        RunFailed: A process of the run failed; the message names it.
        KeyboardInterrupt: It came a second time; the run has ended without saving.
    """
    keys = {**keys, **({} if data_folder is None else {"data_folder": str(data_folder)})}
    passed = _pass_on(keys, model, train_data, val_data)
    keys.setdefault("weights_dir", read_yaml(default_config(program_folder())).values.get("weights_dir"))
    keys["weights_dir"] = str(keys["weights_dir"] or "runs")
    if not keys.get("run_name") and not keys.get("resume_train"):
        named = make_folder_named_by_time(Path(keys["weights_dir"]), keys.get("model", "run"))
        keys["run_name"] = named.name
    elif not keys.get("run_name") and keys["resume_train"] is True:
        keys["run_name"] = newest(Path(keys["weights_dir"])).name
    return _Launch(keys, passed, callback, quiet).run()


def resume(
    folder: str | Path | Run,
    *,
    model: str | type | Callable[..., Any] | None = None,
    train_data: Any = None,
    val_data: Any = None,
    callback: Callback | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Resume a run from its newest checkpoint. Results and errors as of `train`.

    Args:
        folder: The run's folder, or a Run, which also has the network and datasets that were passed to it.
        model: The network, if the run was given a class or function that cannot be imported by name.
        train_data: The dataset, if the run was given one.
        val_data: The dataset to validate on, with `train_data`.
        callback: As of `train`.
        quiet: Show nothing.
        **keys: Keys that change.
    """
    place = (folder.folder if isinstance(folder, Run) else Path(folder)).absolute()
    if not (place / "config.yaml").is_file():
        raise UserError(f"{place}: is not a run's folder: it has no config.yaml. Give the folder of a run.")
    passed = _pass_on(keys, model, train_data, val_data)
    if isinstance(folder, Run):
        passed = {**folder._passed, **passed}
    keys = {**keys, "resume_train": True, "weights_dir": str(place.parent), "run_name": place.name}
    return _Launch(keys, passed, callback, quiet).run()


class _Launch:
    """One launcher process, from its start to its exit status."""

    def __init__(
        self, keys: dict[str, Any], passed: dict[Kind, Any], callback: Callback | None, quiet: bool
    ) -> None:
        self._folder = Path(keys["weights_dir"], str(keys.get("run_name"))).absolute()  # a callback may chdir
        if isinstance(keys.get("load_epoch"), int | np.integer):
            self._folder = folder_after(self._folder, f"epoch_{keys['load_epoch']:04d}")
        self._arguments = [f"{key}={_as_yaml(key, value)}" for key, value in keys.items()]
        self._passed, self._callback, self._silent = passed, callback, quiet
        self._in_notebook = _is_in_notebook()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._has_bar = not quiet and (self._in_notebook or is_terminal)
        self._last_line, self._n_interrupts, self._asked = "", 0, False
        self._log = self._folder / log_name((keys | torchrun_keys(os.environ, keys)).get("host_rank") or 0)
        self._position = self._log.stat().st_size if self._log.exists() else 0

    def run(self) -> Run:
        """Wait for the end. KeyboardInterrupt is passed on: the run finishes its step and saves."""
        try:
            # The kernel keeps no exit codes of children where SIGCHLD is ignored. The first Ctrl-C lets a
            # callback return, another raises KeyboardInterrupt. A handler of the caller's own stays.
            with (
                objects.pickled(self._passed) as passed,
                _replaced(signal.SIGCHLD, signal.SIG_IGN, signal.SIG_DFL),
                _replaced(signal.SIGINT, signal.default_int_handler, self._count_interrupt),
            ):
                process = self._start(_environment() | passed)
                reader = threading.Thread(target=self._read, args=(process,), daemon=True)
                try:
                    reader.start()
                    self._wait(process)
                except BaseException:
                    self._silent = True
                    process.kill()  # the run's processes end with it
                    process.wait()
                    raise
                reader.join()
        except BaseException:
            self._remove_empty_folder()
            raise
        return self._result(process.returncode)

    def _start(self, environment: dict[str, str]) -> "subprocess.Popen[str]":
        caller = os.getpid()

        def end_with_caller() -> None:
            die_with_parent()
            # A Ctrl-C that is passed on while Python starts waits until `Interrupts` can handle it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            if os.getppid() != caller:  # it died before the line above
                os._exit(1)

        return subprocess.Popen(
            _command(["train", *self._arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment | (SEND_BAR if self._has_bar else {}),
            process_group=0,  # Ctrl-C in a terminal reaches this process only, which passes it on
            preexec_fn=end_with_caller,  # noqa: PLW1509
        )

    def _count_interrupt(self, *_: object) -> None:
        self._n_interrupts += 1
        if self._n_interrupts > 1:
            raise KeyboardInterrupt

    def _wait(self, process: "subprocess.Popen[str]") -> None:
        """Pass on events until the launcher has ended. Raise KeyboardInterrupt if it comes twice."""
        while True:
            try:
                ended = process.poll() is not None
                self._pass_events_on(process)
                if self._n_interrupts:
                    self._ask_to_stop(process)
                if ended:
                    return
                time.sleep(_LOOK_SECONDS)
            except KeyboardInterrupt:  # raised by the callback, or by a handler of the caller's own
                self._n_interrupts += 1
                if self._n_interrupts > 1:
                    raise

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Show the launcher's output, and keep its last line."""
        assert process.stdout
        bar = ProgressBar(self._in_notebook)
        for line in process.stdout:
            state = read_bar_line(line)
            if state is None:
                self._last_line = line.strip() or self._last_line
            with suppress(OSError, ValueError):  # the caller has closed its output
                self._show(line, state, bar)
        bar.close()

    def _show(self, line: str, state: BarState | None, bar: ProgressBar) -> None:
        if self._silent or sys.stdout is None:
            return
        if state is not None:
            bar.move(state)
            return
        tqdm.write(line, file=sys.stdout, end="")
        sys.stdout.flush()

    def _pass_events_on(self, process: "subprocess.Popen[str]") -> None:
        for event, position in _events(self._log, self._position):
            self._position = position  # a callback that raises KeyboardInterrupt gets the later events
            if event["event"] in _RECORDS and self._callback and self._callback(event) == "stop":
                self._ask_to_stop(process)

    def _ask_to_stop(self, process: "subprocess.Popen[str]") -> None:
        if not self._asked:
            self._asked = True
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)

    def _result(self, status: int) -> Run:
        if status == 0 or (status in _STOPPED and self._asked):
            return Run(self._folder, status == 0, self._passed)
        self._remove_empty_folder()
        text = _without_name(self._last_line)
        raise UserError(text) if status == 2 else RunFailed(text or f"the run ended with status {status}")

    def _remove_empty_folder(self) -> None:
        """Remove the folder if it was made for the name, and nothing was written."""
        with suppress(OSError):
            if os.listdir(self._folder) == ["checkpoints"]:  # else another run may be writing there
                (self._folder / "checkpoints").rmdir()
                self._folder.rmdir()


def _is_complete(folder: Path) -> bool:
    """Return whether no epoch is left, by a run's newest checkpoint; False without one that can be read."""
    try:
        state = read_state(records(folder)[-1])
        config, _ = resolve([read_run(folder / "config.yaml")])
    except (IndexError, OSError, UserError):
        return False
    is_last = state.is_complete and state.epoch >= config.n_epochs
    return is_last or has_ended(state.val_record, monitor_of(config), config.patience)


@contextmanager
def _replaced(number: signal.Signals, usual: Any, handler: Any) -> Iterator[None]:
    """Give a signal another handler inside the block if it has the usual one.

    Threads other than the main one receive no signals, and their handlers stay.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(number) is not usual:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, usual)


def _events(log: Path, position: int) -> Iterator[tuple[Event, int]]:
    """Yield the whole events of a log from a byte position on, each with the position behind it."""
    try:
        with open(log, "rb") as file:
            file.seek(position)
            content = file.read()
    except OSError:
        return
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        position += len(line)
        if event := parse_event(line):
            yield event, position


def _pass_on(keys: dict[str, Any], model: Any, train_data: Any, val_data: Any) -> dict[Kind, Any]:
    """Set the keys `model` and `data`. Return the objects that they do not name.

    Raises:
        UserError: An argument can't be used, or this is a process that multiprocessing started.
    """
    if multiprocessing.parent_process() is not None or child_main.NAME in os.environ:
        raise UserError(
            "lockstep.train: called in a child process, perhaps by a module that the run's processes import. "
            'Call it in the main program, and in a module below `if __name__ == "__main__":`.'
        )
    passed: dict[Kind, Any] = {}
    if model is not None and not isinstance(model, str):
        if not callable(model):
            raise UserError(
                f"model: must be a name, or a class or function that makes a network, not {model!r:.100}"
            )
        keys["model"] = _import_name_of(model)
        if keys["model"] is None:
            keys["model"], passed["model"] = f"{objects.SOURCE}:{_plain_name_of(model)}", model
    elif model is not None:
        keys["model"] = model
    if (train_data is None) != (val_data is None):
        raise UserError("train_data and val_data: one is missing. Give both.")
    if train_data is not None:
        if "data_folder" in keys or "data" in keys:
            raise UserError("train_data: given beside another dataset. Give one of them.")
        keys["data"], passed["data"] = f"{objects.SOURCE}:datasets", (train_data, val_data)
    return passed


def _import_name_of(value: Any) -> str | None:
    """Return 'module:Name' for a class or function that can be imported by that name, else None."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module in ("", "__main__") or getattr(sys.modules.get(module), name, None) is not value:
        return None
    try:
        return f"{module}:{name}" if importlib.util.find_spec(module) else None
    except (ImportError, ValueError):  # a module that some program made
        return None


def _plain_name_of(value: Any) -> str:
    """Return a name of letters, digits and _ for messages and folders."""
    return re.sub(r"\W", "", str(getattr(value, "__qualname__", "")).rpartition(".")[2]) or "model"


def _is_in_notebook() -> bool:
    """Return whether this is the process of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _as_yaml(key: str, value: Any) -> str:
    """Return a key's value as the command line takes it: YAML on one line."""
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else plain
    try:
        text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"))
    except yaml.YAMLError:
        advice = ". Pass datasets as train_data and val_data" if key == "data" else ""
        raise UserError(
            f"{key}: must be a text, a number, a list or a mapping of these, not {value!r}{advice}"
        ) from None
    return text.removesuffix("\n").removesuffix("\n...")


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "lockstep.cli", *arguments]


def _environment() -> dict[str, str]:
    """Return the environment in which a run imports what the caller can import, from the same places."""
    path = [os.path.abspath(place) for place in sys.path]  # '' is the working directory
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _without_name(line: str) -> str:
    return line.removeprefix("lockstep: ")
