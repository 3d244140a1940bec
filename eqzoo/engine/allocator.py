"""Settings of glibc's allocator for training on a CPU: freed memory stays with the process."""

import ctypes
import os
import sys
import threading

__all__ = ["keep_freed_memory"]

# mallopt's parameters (malloc.h), and what they are set to.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}

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
                print("eqzoo: glibc keeps freed memory for the next step (EQZOO_MALLOC=0 leaves it)", file=sys.stderr)
        return _done


def _wanted() -> bool:
    tuned = any(key.startswith("MALLOC_") and key.endswith("_") for key in os.environ)
    tuned |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return os.environ.get("EQZOO_MALLOC") != "0" and not tuned and _is_glibc()


def _is_glibc() -> bool:
    """Whether the malloc that this process calls is that of glibc, and not one that was loaded before it."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        own = ctypes.CDLL("libc.so.6").malloc
    except (AttributeError, OSError, ValueError):  # no such name, library or function: not Linux with glibc
        return False
    address = [ctypes.cast(function, ctypes.c_void_p).value for function in (own, ctypes.CDLL(None).malloc)]
    return address[0] == address[1]


def _mallopt(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL("libc.so.6").mallopt(ctypes.c_int(parameter), ctypes.c_int(value)))
