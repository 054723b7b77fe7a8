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
    keys = {"precision": "bf16", "para_load": False, "cuda_graph": not setting.rehearsal}
    trainer = LoneTrainer(setting, dataset_folder(setting, work), **keys)
    turns = {"Lockstep bf16": trainer.turn(trainer.resident)}
    try_out(turns["Lockstep bf16"], trainer.synchronize)
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
        trainer.close()
