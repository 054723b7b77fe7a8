"""How the C library hands out memory to a process that frees and asks for the same again, step by step.

All settings are for good, in this process. Other C libraries than glibc have no mallopt, and are left as they
are.
"""

import ctypes

# mallopt(3), malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_MOST = 2**31 - 1
_PAD_BYTES = 64 << 20  # that the heap grows by
_MOST_THRESHOLD = 32 << 20  # the largest that glibc takes for _MMAP_THRESHOLD on 64 bits


def keep_freed_memory() -> None:
    """Has freed memory kept for the next step instead of given back: in processes of our own.

    By itself glibc gives large blocks back to the kernel at once. A step of AlexNet then takes 120,000 pages
    for its gradients and activations anew, each of which the kernel clears: a tenth to a quarter of its time.
    """
    _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST, _TOP_PAD: _PAD_BYTES})


def keep_small_freed_memory() -> None:
    """The same for pieces of up to 32 MiB: in the user's process, whose large arrays are given back.

    Shares of a minibatch and their gradients are smaller, so a settled step has no page faults.
    """
    _set({_MMAP_THRESHOLD: _MOST_THRESHOLD, _TRIM_THRESHOLD: _MOST})


def share_one_heap() -> None:
    """Has threads that begin from now on allocate from the main thread's heap.

    glibc gives threads heaps of their own, from which large pieces go back to the system whenever they are
    freed: a worker would get new pages, which have to be cleared, for each result.
    """
    _set({_ARENA_MAX: 1})


def _set(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)
