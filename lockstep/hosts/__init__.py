"""Several hosts: one launcher on each, which meet at an address, agree, and watch over each other.

    torchrun.py   what torchrun's variables say
    addresses.py  the meeting point, and which address of this host reaches it
    store.py      a connection to torch.distributed's store, every wait of which has an end
    meeting.py    how hosts come together, and what they tell each other
    lifelines.py  connections by which they notice that a launcher is gone
    life.py       signs of life, and how each has ended (endings.py)
    folders.py    runs' folders: which are shared, and checkpoints sent to hosts that lack them
    agreement.py  what has to be alike on all hosts
    network.py    a trainer's connections to those of its local rank on other hosts
    sums.py       ways to a sum: all-reduce, along a tree, rounded (wire.py); riders.py: what goes with it
    over.py       a transport over hosts, of one inside a host; early.py: its sums during backward
    everyone.py   what trainers of all hosts tell each other besides; cost.py: what a step's sums cost

Between hosts go numbers, JSON, and files of checkpoints; nothing is unpickled. What launchers use imports
torch when a connection is made, not before.
"""
