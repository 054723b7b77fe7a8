"""Plain PyTorch with torch.compile beside Lockstep's captured step."""

import importlib
from pathlib import Path

import torch

from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.lone import LoneTrainer, PlainTraining, compute_in
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import take_turns_kept, try_out
from lockstep.loading import Batch

_MODES = ("default", "reduce-overhead")


def run(setting: Setting, work: Path, record: Record) -> None:
    # The plain form comes first: its batch is made of images, which plain PyTorch takes, too.
    trainers = {
        f"Lockstep bf16, conv_layout: {form}": _trainer(setting, work, form) for form in ("plain", "auto")
    }
    first = next(iter(trainers.values()))
    turns = {name: trainer.turn(trainer.resident) for name, trainer in trainers.items()}
    for turn in turns.values():
        try_out(turn, first.synchronize)
    batch = first.resident.batch()
    first.synchronize()
    for mode in _MODES:
        with record.attempt(f"torch.compile, {mode}"):
            turn = _peer(setting, batch, mode).turn()
            try_out(turn, first.synchronize)
            turns[f"plain PyTorch, torch.compile, {mode}"] = turn
            # Measured at once: compiling in the next mode may take longer than the section has.
            take_turns_kept(turns, first.synchronize, setting, record)
    with record.attempt("closing"):
        for trainer in trainers.values():
            trainer.close()


def _peer(setting: Setting, batch: Batch, mode: str) -> PlainTraining:
    """Plain PyTorch, whose first step compiles."""
    compute_in(None, batch.images.device)
    module = importlib.import_module(f"models.{setting.model}")
    peer = PlainTraining(module.Model(setting.n_classes, **setting.model_args), batch.images, batch.labels)
    options = {"backend": "eager"} if setting.rehearsal else {"mode": mode}
    peer.model = torch.compile(peer.model, **options)
    return peer


def _trainer(setting: Setting, work: Path, form: str) -> LoneTrainer:
    keys = {"precision": "bf16", "para_load": False, "cuda_graph": not setting.rehearsal}
    return LoneTrainer(setting, dataset_folder(setting, work), conv_layout=form, **keys)
