"""Settings of the C library's allocator for processes that free and allocate the same memory in every step.

They are permanent for this process. C libraries other than glibc have no mallopt and are left as they are.
"""

import ctypes

# mallopt(3), malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_MOST = 2**31 - 1
_PAD_BYTES = 64 << 20  # the heap grows in such units
_MOST_THRESHOLD = 32 << 20  # the largest _MMAP_THRESHOLD that glibc accepts on 64 bits


def keep_freed_memory() -> None:
    """Keep freed memory for the next step instead of returning it to the system, in Lockstep's own processes.

    By default glibc returns large blocks to the kernel at once. A step of AlexNet then takes 120,000 new
    pages for gradients and activations. The kernel clears each, which takes a tenth to a quarter of the
    step's time.
    """
    _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST, _TOP_PAD: _PAD_BYTES})


def keep_small_freed_memory() -> None:
    """Keep freed pieces of up to 32 MiB, in the user's process, whose large arrays are returned.

    Shares of a minibatch and their gradients are smaller, so steps soon have no page faults.
    """
    _set({_MMAP_THRESHOLD: _MOST_THRESHOLD, _TRIM_THRESHOLD: _MOST})


def share_one_heap() -> None:
    """Have threads that start from now on allocate from the main thread's heap.

    glibc gives threads separate heaps, which return large pieces to the system whenever they are freed. A
    worker would get new pages, which the kernel must clear, for each result.
    """
    _set({_ARENA_MAX: 1})


def _set(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)
