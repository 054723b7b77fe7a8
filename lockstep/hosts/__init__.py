"""Training over several hosts: one launcher on each, rendezvous, liveness, and sums over the network.

Read in this order; a file imports only from files above it:

    addresses.py     the rendezvous, and which address of this host reaches the others
    store.py         a client of torch.distributed's store with a deadline on every call; checks of its values
    rendezvous.py    how the launchers join, exchange JSON, and notice that a launcher has exited
    heartbeat.py     a heartbeat every second, and the exit status of every host
    agreement.py     what is equal on all hosts before the first step, and how a run continues after a failure
    folders.py       shared run folders, and checkpoints sent to hosts that lack them
    all_reduce.py    all-reduce algorithms: the library's, along a tree, rounded to bfloat16
    network.py       the process group of the trainers of equal local rank
    hierarchical.py  a transport over all hosts, made of a transport inside each host

Hosts exchange tensors, JSON and files of checkpoints. Nothing is unpickled. The files that launchers use
import torch when they open a connection, not before.
"""
