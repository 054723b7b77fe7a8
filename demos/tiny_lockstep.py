"""Lockstep in one file: two trainers and two loaders that work on each other's memory.

    python demos/tiny_lockstep.py [EPOCHS]          # on data/digits, which `make data` makes

Each trainer holds a replica of the network in an arena of shared memory. Its loader writes the next batch
into a slot of shared memory meanwhile. After every step, each trainer averages its shard of all arenas and
writes the mean into all of them. Order and crops depend on (seed, epoch, sample) only. It ends with the bits
of `train.py model_args='{dropout: 0}' rand_mirror=false cpu_threads=1 devices='[cpu, cpu]' n_epochs=2`.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.optim.sgd import sgd

N_RANKS, BATCH, N_SLOTS, SIZE, BLOCK = 2, 32, 3, 32, 16
RATE, MOMENTUM, DECAY, SEED = 0.02, 0.9, 0.0005, 0
ORDER, ROW, COLUMN, INITIALISATION = 1, 2, 3, 6  # purposes of random choices: lockstep/data/randomness.py


class Network(nn.Module):
    """Three convolutions and two linear layers, as models/smallnet.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.fc4, self.fc5 = nn.Linear(2048, 128), nn.Linear(128, 10)
        for layer in self.children():
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, images):
        x = images / 64
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(F.max_pool2d(conv(x), 2))
        return self.fc5(F.relu(self.fc4(x.flatten(1))))


def generator(epoch, purpose):
    """Return a random generator that depends on seed, epoch and purpose only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, epoch, purpose])))


def order_of(epoch, rows):
    """Return the samples of an epoch: blocks of rows of all files, in random order."""
    files = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    blocks = [file[start : start + BLOCK] for file in files for start in range(0, len(file), BLOCK)]
    return np.concatenate([blocks[i] for i in generator(epoch, ORDER).permutation(len(blocks))])


def shares(n_samples, rank):
    """Yield, for each step of an epoch, the size of the batch and the part [first, last) of this rank."""
    for start in range(0, n_samples, N_RANKS * BATCH):
        size = min(N_RANKS * BATCH, n_samples - start)
        yield size, start + -(-size * rank // N_RANKS), start + -(-size * (rank + 1) // N_RANKS)


def load(rank, folder, n_epochs, images, labels, free, full):
    """Run the loader of a trainer: write every batch into the next free slot."""
    files = [h5py.File(path)["data"][:] for path in sorted(folder.glob("train_hkl/*.hkl"))]
    pixels, mean = np.concatenate(files), np.load(folder / "misc/img_mean.npy")
    classes, slot = np.load(folder / "labels/train_labels.npy"), 0
    for epoch in range(1, n_epochs + 1):
        order = order_of(epoch, [len(file) for file in files])
        margin = pixels.shape[1] - SIZE
        rows, columns = (generator(epoch, p).integers(margin + 1, size=len(pixels)) for p in (ROW, COLUMN))
        for _, first, last in shares(len(pixels), rank):
            free.acquire()
            for place, sample in enumerate(order[first:last]):
                crop = np.s_[rows[sample] : rows[sample] + SIZE, columns[sample] : columns[sample] + SIZE]
                images[slot, place] = torch.from_numpy(pixels[sample][crop] - mean[crop])
            labels[slot, : last - first] = torch.from_numpy(classes[order[first:last]])
            slot = (slot + 1) % N_SLOTS
            full.release()


def train(rank, folder, n_epochs, images, labels, free, full, arenas, barrier):
    """Run a trainer: take steps, and average the arenas (a row of weights, one of momenta)."""
    torch.set_num_threads(1)
    torch.manual_seed(int(np.random.SeedSequence([INITIALISATION, SEED]).generate_state(1, np.uint64)[0]))
    model, n_samples, slot = Network(), len(np.load(folder / "labels/train_labels.npy")), 0
    weights, momenta = (dict(views(flat, model)) for flat in arenas[rank])
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].copy_(parameter.data)
    shard = slice(*(arenas[0].shape[1] * number // N_RANKS for number in (rank, rank + 1)))
    for epoch in range(1, n_epochs + 1):
        for size, first, last in shares(n_samples, rank):
            full.acquire()
            batch = images[slot, : last - first].permute(0, 3, 1, 2)
            loss = F.cross_entropy(model(batch), labels[slot, : last - first], reduction="sum")
            (loss / (size / N_RANKS)).backward()  # the mean over ranks is then that of the batch
            slot = (slot + 1) % N_SLOTS
            free.release()
            update(dict(model.named_parameters()), momenta)
            model.zero_grad()
            barrier.wait()  # every trainer has taken its own step
            mean = sum(arena[:, shard] for arena in arenas) / N_RANKS
            for arena in arenas:
                arena[:, shard] = mean
            barrier.wait()  # every shard is averaged
        if rank == 0:
            print(f"epoch {epoch}: loss of the last batch {loss.item() / (last - first):.4f}", flush=True)


def update(parameters, momenta):
    """Take one step of SGD with momentum: biases learn at twice the rate and do not decay."""
    for is_bias in (False, True):
        names = [name for name in parameters if name.endswith("bias") == is_bias]
        weights, gradients = [parameters[n].data for n in names], [parameters[n].grad for n in names]
        keys = {"weight_decay": 0.0 if is_bias else DECAY, "lr": RATE * (1 + is_bias), "momentum": MOMENTUM}
        fixed = {"fused": True, "dampening": 0.0, "nesterov": False, "maximize": False}
        sgd(weights, gradients, [momenta[n] for n in names], **keys, **fixed)


def views(flat, model):
    """Yield (name, view of its part of a flat tensor) of every parameter; convolutions lie channels last."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    for (name, parameter), part in zip(model.named_parameters(), flat.split(sizes), strict=True):
        layout = torch.channels_last if parameter.dim() == 4 else torch.contiguous_format
        strides = parameter.to(memory_format=layout).stride()
        yield name, part.as_strided(parameter.shape, strides, part.storage_offset())


def main(folder=Path("data/digits"), n_epochs=2):
    """Train with two trainers and two loaders. Return the trained weights as a state dict."""
    context, network, rings, processes = mp.get_context("spawn"), Network(), [], []
    barrier, n_weights = context.Barrier(N_RANKS), sum(each.numel() for each in network.parameters())
    arenas = [torch.zeros(2, n_weights).share_memory_() for _ in range(N_RANKS)]  # weights, momenta
    for rank in range(N_RANKS):
        images = torch.empty(N_SLOTS, BATCH, SIZE, SIZE, 3).share_memory_()
        labels = torch.empty(N_SLOTS, BATCH, dtype=torch.int64).share_memory_()
        rings.append((images, labels, context.Semaphore(N_SLOTS), context.Semaphore(0)))
        arguments = (rank, folder, n_epochs, *rings[rank])
        for target, args in ((load, arguments), (train, (*arguments, arenas, barrier))):
            processes.append(context.Process(target=target, args=args))
            processes[-1].start()
    for process in processes:
        process.join()
    return dict(views(arenas[0][0], network))


if __name__ == "__main__":
    main(n_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 2)
