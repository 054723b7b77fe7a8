"""The former place of `LocalResponseNorm`: networks of users, also in run folders, import it from here."""

from lockstep.network.layers import LocalResponseNorm as LocalResponseNorm
