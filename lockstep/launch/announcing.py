"""What a run says before its processes start."""

from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.launch.console import Console
from lockstep.loading.orders import Orders
from lockstep.runs.folder import Run


def announce(console: Console, dataset: Dataset, run: Run, config: Config, orders: Orders) -> None:
    """The data, the devices, where it goes on from, and what the user should know of that."""
    console.say(
        f"{len(dataset.train):,} training and {len(dataset.val):,} validation images, "
        f"{dataset.n_classes} classes; {len(config.devices)} trainer(s) on {', '.join(config.devices)}"
    )
    for notice in run.notices:
        console.say(f"note: {notice}")
    if run.start:
        state = run.start.state
        console.say(f"going on from {run.start.path} (epoch {state.epoch}, {state.position} images in)")
        before = state.config.get("minibatch") or state.n_trainers * state.config["batch_size"]
        if before != orders.minibatch_size:
            console.say("note: minibatches have another size than before; no image is lost or seen twice")
        console.log("resumed", {"checkpoint": str(run.start.path)})
