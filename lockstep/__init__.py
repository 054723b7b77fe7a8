"""What train.py, train_funcs.py and proc_load.py stand on: one room for each concern.

From the lowest up; a room imports those above it in this list, never those below (`make check` sees to it).

    errors.py     what a user is told                    files.py   files that appear whole or not at all
    interrupts.py Ctrl-C and SIGTERM                     typed.py   YAML values as the types of annotations
    optim/        optimizers, one file each, and learning rates
    config/       the keys of a run: their types, layers of files, what can't be
    comm/         messages, pipes whose waits have deadlines, groups of processes
    memory/       blocks of host or device memory that other processes open
    kernels/      CUDA kernels and how they are compiled
    data/         files of pictures, datasets, manifests, the order of samples, randomness, augmentation
    loading/      slots, rings and feeds: how minibatches come into memory
    exchange/     collectives from memory to memory, and the proof that devices reach each other
    runs/         a run's folder, its checkpoints, the versions that it was made with
    network/      a network's tensors in one block, and what is done with a batch
    sync/         rules: what trainers exchange after a step, and when
    backends/     what depends on the kind of device: CPUs, NVIDIA GPUs, which ones to use
    flow/         dataflow: operations of torch that run when their inputs are ready
    hosts/        several hosts: how they meet, agree, exchange and watch over each other
    launch/       starting, watching and ending processes; what they say; the command line
    synk/         functions over data on several processes: Synkhronos's programming interface
    evaluate/     validation on its own
    pretrained/   starting from weights that were trained elsewhere
    export/       a trained network for other programs
    report/       a page about a run
    trace/        what a run's processes did and when, for Perfetto and Chrome
    doctor/       what a machine has, and what is wrong with it
"""

__version__ = "0.1.0"
