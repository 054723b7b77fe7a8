"""The process of a run that was started from Python: its output, its events, and its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lockstep import objects
from lockstep.api import commands
from lockstep.api.arguments import as_yaml
from lockstep.api.run import RECORDS, Event, Run, events
from lockstep.config.hosts import torchrun_keys
from lockstep.errors import UserError
from lockstep.launch.children import describe_exit
from lockstep.launch.console import SEND_BAR, BarState, ProgressBar, read_bar_line
from lockstep.objects import Kind
from lockstep.runs.folder import folder_after, log_name
from lockstep.signals import die_with_parent

Callback = Callable[[Event], object]
_LOOK_SECONDS = 0.05  # between looks at the log
_STOPPED = (130, 143)  # exit statuses of a run that was asked to stop


class RunFailed(RuntimeError):
    """A run ended early; the message is its last line, which names the process that failed."""


class Launch:
    """One launcher process, from its start to its exit status."""

    def __init__(
        self, keys: dict[str, Any], passed: dict[Kind, Any], callback: Callback | None, quiet: bool
    ) -> None:
        self._folder = Path(keys["weights_dir"], str(keys.get("run_name"))).absolute()  # a callback may chdir
        if isinstance(keys.get("load_epoch"), int | np.integer):
            self._folder = folder_after(self._folder, f"epoch_{keys['load_epoch']:04d}")
        self._arguments = [f"{key}={as_yaml(key, value)}" for key, value in keys.items()]
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
                process = self._start(commands.environment() | passed)
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
            commands.lockstep_command(["train", *self._arguments]),
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
        for event, position in events(self._log, self._position):
            self._position = position  # a callback that raises KeyboardInterrupt gets the later events
            if event["event"] in RECORDS and self._callback and self._callback(event) == "stop":
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
        text = commands.without_name(self._last_line)
        if not text or (status < 0 and text == self._last_line):  # no process had the time to say more
            text = f"the run's launcher {describe_exit(status)}"
        raise UserError(text) if status == 2 else RunFailed(text)

    def _remove_empty_folder(self) -> None:
        """Remove the folder if it was made for the name, and nothing was written."""
        with suppress(OSError):
            if os.listdir(self._folder) == ["checkpoints"]:  # else another run may be writing there
                (self._folder / "checkpoints").rmdir()
                self._folder.rmdir()


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


def _is_in_notebook() -> bool:
    """Return whether this is the process of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
