"""How the C library hands out memory to a process that frees and asks for the same again, step by step."""

import ctypes

# mallopt(3), malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_MOST = 2**31 - 1
_PAD_BYTES = 64 << 20  # that the heap grows by


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next step instead of giving it back; for good, in this process.

    By itself it gives large blocks back to the kernel at once. A step of AlexNet then takes 120,000 pages for
    its gradients and activations anew, each of which the kernel clears: a tenth to a quarter of its time.
    Other C libraries have no mallopt, and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _MOST), (_TOP_PAD, _PAD_BYTES)):
        mallopt(parameter, value)
