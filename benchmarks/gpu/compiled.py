"""Plain PyTorch with torch.compile beside Lockstep's captured step."""

import importlib
from pathlib import Path

import torch

from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.lone import LoneTrainer, PlainTraining, compute_in
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import take_turns_kept, try_out

_MODES = ("default", "reduce-overhead")


def run(setting: Setting, work: Path, record: Record) -> None:
    # The plain form comes first: its batch is made of images, which plain PyTorch takes, too.
    trainers = {
        f"Lockstep bf16, conv_layout: {form}": _trainer(setting, work, form) for form in ("plain", "auto")
    }
    turns = {name: trainer.turn(trainer.resident) for name, trainer in trainers.items()}
    trainer = next(iter(trainers.values()))
    for turn in turns.values():
        try_out(turn, trainer.synchronize)
    batch = trainer.resident.batch()
    trainer.synchronize()
    compute_in(None, batch.images.device)
    for mode in _MODES:
        with record.attempt(f"torch.compile, {mode}"):
            module = importlib.import_module(f"models.{setting.model}")
            peer = PlainTraining(
                module.Model(setting.n_classes, **setting.model_args), batch.images, batch.labels
            )
            options = {"backend": "eager"} if setting.rehearsal else {"mode": mode}
            peer.model = torch.compile(peer.model, **options)
            try_out(peer.turn(), trainer.synchronize)
            turns[f"plain PyTorch, torch.compile, {mode}"] = peer.turn()
    take_turns_kept(turns, trainer.synchronize, setting, record)
    with record.attempt("closing"):
        for trainer in trainers.values():
            trainer.close()


def _trainer(setting: Setting, work: Path, form: str) -> LoneTrainer:
    keys = {"precision": "bf16", "para_load": False, "cuda_graph": not setting.rehearsal}
    return LoneTrainer(setting, dataset_folder(setting, work), conv_layout=form, **keys)
