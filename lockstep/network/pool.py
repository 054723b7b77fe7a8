"""`ReluMaxPool` at its former place, from which networks in run folders import it."""

from lockstep.network.layers import ReluMaxPool as ReluMaxPool
