"""The former place of `ReluMaxPool`: networks of users, also in run folders, import it from here."""

from lockstep.network.layers import ReluMaxPool as ReluMaxPool
