"""Several hosts: one launcher on each, which meet at an address, agree, and watch over each other.

    addresses.py  the meeting point, and which address of this host reaches it
    store.py      a connection to torch.distributed's store, every wait of which has an end
    meeting.py    how hosts come together, and what they tell each other

Between hosts go numbers and JSON, nothing else. torch is imported when a connection is made, not before.
"""
