"""The command `lockstep`: one name for the programs of the repository, from any folder."""

import json
import os
import runpy
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import __version__
from lockstep.errors import UserError, nearest
from lockstep.files import program_folder, refusing_unusable_paths, working_directory
from lockstep.text import escape_when_printing, handle_closed_pipe


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        target: A file of the program folder, or a module of this package.
        purpose: One line for people.
        examples: Command lines that show it.
    """

    target: str
    purpose: str
    examples: tuple[str, str]


COMMANDS = {
    "train": Command(
        "train.py",
        "train a network, or resume a run",
        (
            "lockstep train my_images rand_mirror=true",
            "lockstep train resume_train=true run_name=try1 n_epochs=20",
        ),
    ),
    "convert": Command(
        "preprocessing/make_hkl.py",
        "convert images to a dataset to train on",
        ("lockstep convert my_images data/mine --size 36", "lockstep convert /data/imagenet data/imagenet"),
    ),
    "inspect": Command(
        "preprocessing/inspect_data.py",
        "show a dataset's classes, labels and images",
        ("lockstep inspect data/mine", "lockstep inspect data/mine --augmented crop=random_resized"),
    ),
    "validate": Command(
        "validate.py",
        "measure the error of a run's network on the validation images",
        ("lockstep validate runs/try1", "lockstep validate runs/try1 --ten-crops"),
    ),
    "verify": Command(
        "verify.py",
        "check that a run happened as its receipts say",
        ("lockstep verify runs/try1", "lockstep verify runs/try1 --replay 20"),
    ),
    "predict": Command(
        "classify.py",
        "print the most probable classes of images",
        ("lockstep predict photo.jpg", "lockstep predict *.jpg --run runs/try1"),
    ),
    "report": Command(
        "lockstep.report",
        "write a page about one or several runs",
        ("lockstep report runs/try1", "lockstep report runs/try1 runs/try2 --out comparison"),
    ),
    "doctor": Command(
        "lockstep.doctor",
        "check what this machine has and how fast it is",
        ("lockstep doctor data/mine", "lockstep doctor --run runs/try1"),
    ),
    "trace": Command(
        "lockstep.trace",
        "convert the trace of a run with trace=true",
        ("lockstep train data/mine trace=true run_name=try1", "lockstep trace runs/try1"),
    ),
    "resize": Command(
        "lockstep.launch.resize",
        "give a run other devices while it trains",
        ("lockstep resize runs/try1 devices=[cpu,cpu]", "lockstep resize runs/try1 +1"),
    ),
    "export": Command(
        "lockstep.export",
        "write a trained network for other programs",
        ("lockstep export runs/try1 --to torchvision", "lockstep export runs/try1 --to onnx"),
    ),
    "init": Command(
        "",
        "copy config.yaml, the specs and an example network to a new folder for editing",
        ("lockstep init my_project", "lockstep init ."),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: The command line without the program's name; None: that of this process.

    Returns:
        The exit status. Most subcommands end the process themselves, with the status of their script.
    """
    escape_when_printing()
    handle_closed_pipe()
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(f"lockstep {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"lockstep: there is no command {name!r}{nearest(name, COMMANDS)}\n{_overview()}", file=sys.stderr
        )
        return 2
    if {"-h", "--help"} & set(rest):
        print("examples:", *COMMANDS[name].examples, sep="\n    ", end="\n\n", flush=True)
    try:
        return _init(rest) if name == "init" else _run(name, rest)
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lockstep: stopped as asked", file=sys.stderr)
        return 130


def _overview() -> str:
    lines = [f"  {name:<9} {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lockstep COMMAND ...",
            "",
            *lines,
            "",
            "lockstep COMMAND --help shows its options, lockstep --version the version.",
        ]
    )


def _run(name: str, words: list[str]) -> int:
    """Run a script as the main program, with `lockstep NAME` as its name. Return 0 unless it exits itself."""
    folder, target = program_folder(), COMMANDS[name].target
    sys.path[:] = [str(folder), *sys.path, working_directory()]  # the user's own networks come last
    command = {"COMMAND": f"lockstep {name}"}  # for help texts: runpy puts the script's path into sys.argv
    sys.argv = [f"lockstep {name}", *(_with_data_folder(words) if name == "train" else words)]
    if target.endswith(".py"):
        runpy.run_path(str(folder / target), command, run_name="__main__")
    else:
        runpy.run_module(target, command, run_name="__main__")
    return 0


def _with_data_folder(words: list[str]) -> list[str]:
    """Return the arguments of train.py; FOLDER before them stands for data_folder=FOLDER."""
    if not words or words[0].startswith("-") or ("=" in words[0] and not os.path.isdir(words[0])):
        return words
    return [f"data_folder={json.dumps(words[0], ensure_ascii=False)}", *words[1:]]  # as YAML text


@refusing_unusable_paths()
def _init(words: list[str]) -> int:
    """Copy what a project of the user's begins with, all files or none. Raises UserError if one exists."""
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: lockstep init FOLDER")
        return 0 if {"-h", "--help"} & set(words) else 2
    source, target = program_folder(), Path(words[0])
    names = ["config.yaml", *sorted(path.name for path in source.glob("spec_*.yaml"))]
    copies = {source / name: target / name for name in names}
    copies[source / "models" / "smallnet.py"] = target / "my_network.py"
    if existing := [str(path) for path in copies.values() if path.exists()]:
        raise UserError(f"{existing[0]}: already exists. Choose another folder, or remove it first.")
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for old, new in copies.items():
            shutil.copyfile(old, new)
    except OSError as error:
        for path in copies.values():  # an unfinished config.yaml would be used, and stop the next try
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise UserError(f"{target}: can't be written: {error.strerror}. Choose another folder.") from error
    print(
        f"{target}: edit config.yaml, then: lockstep train FOLDER. model=my_network:Model trains the example."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
