"""What a process that serves for long does about its memory once it has loaded."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_MIB = 2**20
_PAD = 16 * _MIB
_KEPT = 64 * _MIB
_MAPPED = 32 * _MIB  # the most that glibc takes
_YOUNG = 5000


def freeze_loaded() -> None:
    """Call it when everything is loaded and the first request is still to come.

    What was loaded lives as long as the process, so collections need not look at it: one that does stops every stream for a
    tenth of a second (a hundred thousand objects). Young objects are looked at when there are more of them than some requests
    make: most are gone by then without a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def keep_freed_memory() -> None:
    """Bodies of some hundred kilobytes come and go. Where they lie is better kept than given back to the kernel, which clears
    every page before it gives it out again; up to 80 MiB stay with the process for that. Nothing happens where the C library
    is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for setting, size in ((_M_MMAP_THRESHOLD, _MAPPED), (_M_TRIM_THRESHOLD, _KEPT), (_M_TOP_PAD, _PAD)):
        mallopt(setting, size)
