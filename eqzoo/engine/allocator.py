"""Settings of glibc's allocator for training on a CPU: freed memory stays with the process."""

import ctypes
import os
import sys
import threading

__all__ = ["keep_freed_memory"]

# mallopt's parameters (malloc.h), and what they are set to.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}

_PROBE = 2**26  # bytes of a block that nobody writes to; other threads take less in the microseconds of the question

_lock = threading.Lock()
_done = False


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep what is freed, for the whole process: a training step then reuses its own memory.

    As it is, glibc maps every large tensor anew and returns it when it is freed, so that each step pays for hundreds of
    thousands of page faults. Afterwards nothing is mapped alone (``M_MMAP_MAX`` 0), nothing is returned
    (``M_TRIM_THRESHOLD`` 2³¹ − 1 bytes) and the heap grows by 256 MiB at a time (``M_TOP_PAD``). It says so in a line
    on stderr, once.

    It does nothing where the allocator is not glibc's (another system, tcmalloc by ``LD_PRELOAD``), where the
    environment has settings of its own for it (``MALLOC_..._``, ``GLIBC_TUNABLES``), or with ``EQZOO_MALLOC=0``.

    Returns:
        Whether the settings are made, now or by an earlier call.

    References:
        mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    global _done
    with _lock:
        if not _done and _wanted():
            _done = all(_mallopt(parameter, value) for parameter, value in _SETTINGS.items())
            if _done:
                print(
                    "eqzoo: for faster training, this process keeps memory that is freed instead of returning it to "
                    "the system (EQZOO_MALLOC=0 leaves that as it is)",
                    file=sys.stderr,
                )
        return _done


def _wanted() -> bool:
    tuned = any(key.startswith("MALLOC_") and key.endswith("_") for key in os.environ)
    tuned |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return os.environ.get("EQZOO_MALLOC") != "0" and not tuned and _is_glibc()


class _Statistics(ctypes.Structure):
    """glibc's ``struct mallinfo``: counters of bytes and blocks that wrap around at 2³²."""

    _fields_ = tuple(
        (name, ctypes.c_uint)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _is_glibc() -> bool:
    """Whether glibc serves what this process allocates, and not an allocator that was loaded before it.

    It takes a block as the process does, and looks whether glibc's statistics grow by its size. An address would not
    say it: in a program that is not position-independent, such as Debian's Python, that of malloc is a stub's.
    """
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        glibc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        glibc.mallinfo.restype = _Statistics
        process.malloc.restype = ctypes.c_void_p
        before = _served(glibc)
        block = process.malloc(ctypes.c_size_t(_PROBE))
        grown = (_served(glibc) - before) % 2**32
        process.free(ctypes.c_void_p(block))
    except (AttributeError, OSError, ValueError):  # no such name, library or function: not Linux with glibc
        return False
    return _PROBE <= grown < 2 * _PROBE


def _served(glibc: ctypes.CDLL) -> int:
    """The bytes that glibc has given out, modulo 2³²."""
    statistics = glibc.mallinfo()
    return statistics.hblkhd + statistics.uordblks


def _mallopt(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL("libc.so.6").mallopt(ctypes.c_int(parameter), ctypes.c_int(value)))
