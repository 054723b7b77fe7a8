"""Writing a memory checkpoint to the disk when trainers can't do it in time (`preempt_seconds`)."""

from pathlib import Path

from lockstep.comm.messages import Saved
from lockstep.comm.pipes import Pipe
from lockstep.launch.receipts import add_written_out
from lockstep.launch.status import StatusBoard
from lockstep.runs import checkpoint
from lockstep.runs.snapshot import Retained


def write_out(control: Pipe, board: StatusBoard, retained: Retained, folder: Path) -> None:
    """Write a memory checkpoint into the run's folder. The main function of a process.

    Raises:
        UserError: The disk is full or can't be written.
    """
    board.say("writing the memory checkpoint to the disk")
    tensors, state = retained.tensors(), retained.state()
    path = checkpoint.save(folder, tensors, state)
    add_written_out(folder, path)
    control.send(Saved(str(path)))
