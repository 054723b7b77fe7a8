"""ResNet-50's training step in bf16 on data that is already on the GPU: another kind of load than AlexNet's,
many small kernels and batch normalisation; beside plain PyTorch with the same network."""

import importlib
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.alexnet import PLAIN, make_trainers
from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.lone import PlainTraining, compute_in
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import take_turns_kept, try_out


def run(setting: Setting, work: Path, record: Record) -> None:
    setting = replace(setting, model=setting.residual_model, model_args={})
    trainers = make_trainers(setting, dataset_folder(setting, work), record, ("bf16",))
    if not trainers:
        return
    first = next(iter(trainers.values()))
    turns = {name: trainer.turn(trainer.resident) for name, trainer in trainers.items()}
    with record.attempt(PLAIN):
        batch = first.resident.batch()
        first.synchronize()  # the batch was made in another stream than the one that copies it here
        compute_in(None, batch.images.device)
        network = importlib.import_module(f"models.{setting.model}").Model(setting.n_classes)
        peer = PlainTraining(network, batch.images / 64, batch.labels)
        try_out(peer.turn(), first.synchronize)
        turns[PLAIN] = peer.turn()
    take_turns_kept(turns, first.synchronize, setting, record)
    with record.attempt("closing"):
        for trainer in trainers.values():
            trainer.close()
