"""Convert a user's own images before training, or find the set that was made of them.

    python preprocessing/own_images.py CONFIG DESCRIPTOR

The launcher of a run starts this program if data_folder holds images. CONFIG is the run's configuration as
YAML. The program shows what it finds and does, and writes its result to the file descriptor as JSON: either
"folder", the converted set, or "error", a message for the user. An interrupted conversion is resumed.

Exit code: 0: the set is complete. 2: it could not be made.
"""

import json
import sys
from functools import partial
from pathlib import Path

import yaml

from lockstep.config import Config, Layer, resolve
from lockstep.config.tasks import Task
from lockstep.errors import UserError
from lockstep.programs import make_parser
from lockstep.text import escape_when_printing, handle_closed_pipe
from preprocessing import summary
from preprocessing.inputs import list_source
from preprocessing.layouts import refuse
from preprocessing.listing import Listing, summary_of
from preprocessing.summary import say


def main() -> int:
    """Run the program and return its exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("config", metavar="CONFIG", help="the run's configuration as YAML")
    parser.add_argument("descriptor", metavar="DESCRIPTOR", type=int, help="where to write the result")
    words = parser.parse_args()
    config, _ = resolve([Layer("configuration", yaml.safe_load(words.config))])
    try:
        result = {"folder": str(convert(config))}
    except (UserError, OSError) as error:
        result = {"error": str(error)}
    with open(words.descriptor, "w") as pipe:
        json.dump(result, pipe)
    return 2 if "error" in result else 0


def convert(config: Config) -> Path:
    """Return the current set of the images in data_folder, made or brought up to date if needed.

    Raises:
        UserError: The images can't be used, or the set can't be written.
    """
    source = Path(config.data_folder).absolute()
    say(f"{source}: reading the folder of images")
    listing = list_checked(source, config.val_split, config.task)
    for line in (*summary.class_lines(listing), *summary_of(listing.left_out)):
        say(line)
    # Only now: importing torch takes a second.
    from preprocessing.converting import current_set

    folder = current_set(
        config, source, listing, partial(list_checked, source, config.val_split, config.task)
    )
    for line in summary.advice(listing):
        say(line)
    return folder


def list_checked(source: Path, val_split: float, task: Task) -> Listing:
    """Return the images. Raise UserError if a classifier can't be trained on them."""
    listing = list_source(source, val_split, task)
    if len(listing.classes) < 2 and task == "classify":
        raise refuse(source, f"has one class only, {listing.classes[0]}; a classifier needs two or more")
    return listing


if __name__ == "__main__":
    escape_when_printing()
    handle_closed_pipe(ends_program=False)
    sys.exit(main())
