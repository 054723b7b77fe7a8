"""Keeps what the C library's malloc has got from the kernel, so that a settled step has no page faults."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST = 32 << 20  # the largest that glibc takes for M_MMAP_THRESHOLD on 64 bits


def keep_freed_memory() -> None:
    """Raises the thresholds for this process, for good (mallopt(3)); of glibc, others have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
