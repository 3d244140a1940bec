"""Settings of glibc's allocator for training on a CPU: freed memory stays with the process."""

import ctypes
import os
import sys

# mallopt's parameters (malloc.h), and what they are set to.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}

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
    if not _done and _wanted():
        _done = all(_mallopt(parameter, value) for parameter, value in _SETTINGS.items())
        if _done:
            print(
                "eqzoo: for faster training, this process keeps memory that is freed instead of returning it to the "
                "system (EQZOO_MALLOC=0 leaves that as it is)",
                file=sys.stderr,
            )
    return _done


def _wanted() -> bool:
    tuned = any(key.startswith("MALLOC_") and key.endswith("_") for key in os.environ)
    tuned |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    replaced = "malloc" in os.environ.get("LD_PRELOAD", "")  # tcmalloc, jemalloc and mimalloc
    return os.environ.get("EQZOO_MALLOC") != "0" and not tuned and not replaced and _has_glibc()


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # neither on Windows nor on macOS
        return False


def _mallopt(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL("libc.so.6").mallopt(ctypes.c_int(parameter), ctypes.c_int(value)))
