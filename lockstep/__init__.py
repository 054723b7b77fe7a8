"""The library of train.py, train_funcs.py and proc_load.py: one package for each concern.

A package imports only those above it in this list; `make check` verifies that.

    errors.py     exceptions with messages for users     text.py     text that can be stored and printed
    files.py      files that appear complete or not at all
    extras.py     packages that only some features need  programs.py  the parsers and errors of programs
    signals.py    Ctrl-C and SIGTERM                     threads.py  threads that never delay the exit
    objects.py    functions by name, and what lockstep.train passes
    typed.py      YAML values as annotated types
    trace/        timelines for Perfetto and Chrome: a run's processes, and dataflow
    optim/        optimizers, one file each, and learning rates
    config/       the keys of a run: types, layers of files, and forbidden combinations
    comm/         messages, pipes with timeouts, groups of processes
    memory/       blocks of host or device memory that other processes open
    kernels/      CUDA kernels and their compilation
    data/         image files, datasets, manifests, the order of samples, randomness, augmentation
    loading/      slots, rings and feeds: how batches get into memory
    exchange/     collectives from memory to memory, and the proof that devices reach each other
    runs/         a run's folder, its checkpoints, and the versions that it was made with
    network/      a network's tensors in one block, and its forward and backward pass
    sync/         rules: what trainers exchange after a step, and when
    backends/     code that depends on the kind of device: CPUs, NVIDIA GPUs, and the choice between them
    flow/         dataflow: torch operations that run when their inputs are ready
    hosts/        several hosts: rendezvous, agreement, exchange and heartbeats
    launch/       starting, watching and ending processes; the console; the command line
    trainer/      what a trainer does besides computing: agreeing, saving, validating, reporting
    synk/         functions over data on several processes: Synkhronos's programming interface
    verify/       checks of a run against its receipts
    evaluate/     validation without training
    pretrained/   starting from weights that were trained elsewhere
    export/       trained networks for other programs
    report/       a run's report as a web page
    doctor/       checks of a machine and its devices
    api/          training from Python
    cli.py        the command `lockstep`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api import Run, RunFailed, resume, train
    from lockstep.errors import UserError

__version__ = "0.1.0"
__all__ = ["Run", "RunFailed", "UserError", "resume", "train"]


def __getattr__(name: str) -> Any:
    """Import the functions of the Python API when one is used: importing a part of the package stays fast."""
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep import api, errors

    return errors.UserError if name == "UserError" else getattr(api, name)
