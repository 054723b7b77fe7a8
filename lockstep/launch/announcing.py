"""What a run says before its processes start."""

from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.data.dataset import Dataset
from lockstep.launch.console import Console
from lockstep.loading.orders import Orders
from lockstep.runs.folder import Run

ANSWERS = {"elastic": "centre", "gossip": "mean"}  # what checkpoints hold beside the replicas, by rule


def announce(console: Console, dataset: Dataset, run: Run, config: Config, orders: Orders) -> None:
    """The data, the devices, where it goes on from, and what the user should know of that."""
    where = f", host {config.host} of {config.hosts}" if config.hosts > 1 else ""
    console.say(
        f"{len(dataset.train):,} training and {len(dataset.val):,} validation images, "
        f"{dataset.n_classes} classes; {len(config.devices)} trainer(s) on {', '.join(config.devices)}{where}"
    )
    for notice in run.notices:
        console.say(f"note: {notice}")
    if run.start:
        state = run.start.state
        console.say(f"going on from {run.start.path} (epoch {state.epoch}, {state.position} images in)")
        before = state.config.get("minibatch") or state.n_trainers * state.config["batch_size"]
        if before != orders.minibatch_size:
            console.say("note: minibatches have another size than before; no image is lost or seen twice")
        if note := replicas_left(state.config.get("rule", ""), state.n_trainers, config):
            console.say(f"note: {note}")
        console.log("resumed", {"checkpoint": str(run.start.path)})


def replicas_left(rule: str, n_trainers: int, config: Config) -> str:
    """What to say where a checkpoint's replicas, which are never equal, can't go on each in its trainer.

    rule, n_trainers: those that the checkpoint was made with. Empty where nothing is to be said.
    """
    if (
        rule not in ANSWERS
        or n_trainers < 2
        or (rule_of(config) in ANSWERS and n_trainers == len(config.devices))
    ):
        return ""
    return f"the checkpoint has {n_trainers} replicas of rule: {rule}: all begin with their {ANSWERS[rule]}"
