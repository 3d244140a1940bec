"""Freed memory stays with a process that trains on a CPU: where it should, and only there."""

import os
import platform
import subprocess
import sys

import pytest

from eqzoo.engine import allocator

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

# Tensors of 32 to 128 MiB are taken and freed, again and again; prints the page faults after the first rounds.
CHURN = """
import resource
import torch
from eqzoo.engine.allocator import keep_freed_memory

def churn():
    for size in (2**24, 2**25):
        torch.ones(size), torch.ones(size // 2)

kept = keep_freed_memory()
keep_freed_memory()
for _ in range(2):
    churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    churn()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def churn(**env):
    """Whether memory is kept in a fresh process, its page faults, and what it says."""
    left = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_", "EQZOO_"))}
    ran = subprocess.run([sys.executable, "-c", CHURN], env=left | env, capture_output=True, text=True, check=True)
    kept, faults = ran.stdout.split()
    said = [line for line in ran.stderr.splitlines() if line.startswith("eqzoo:")]  # others may warn
    return kept == "True", int(faults), said


@glibc
@pytest.mark.slow
def test_freed_memory_is_used_again_and_one_line_says_so():
    kept, faults, said = churn()
    assert kept
    kept, many, nothing = churn(EQZOO_MALLOC="0")
    assert not kept
    assert 10 * faults < many  # where the heap lies differs, and with it a few thousand faults
    assert not nothing
    (line,) = said
    assert line.startswith("eqzoo: for faster training, this process keeps memory that is freed")


@pytest.mark.parametrize(
    "chosen",
    [
        {"EQZOO_MALLOC": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "65536"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"},
        {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"},
        ValueError,
        AttributeError,
    ],
    ids=str,
)
def test_who_chose_otherwise_or_has_another_allocator_keeps_it(monkeypatch, capsys, chosen):
    def confstr(name):
        raise chosen(name)

    monkeypatch.setattr(allocator, "_done", False)
    monkeypatch.setattr(allocator, "_mallopt", lambda *_: True)
    for key in [key for key in os.environ if key.startswith(("MALLOC_", "GLIBC_", "EQZOO_", "LD_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setattr("os.confstr", lambda _: "glibc 2.41", raising=False)
    with monkeypatch.context() as patch:
        if isinstance(chosen, dict):
            for key, value in chosen.items():
                patch.setenv(key, value)
        else:
            patch.setattr("os.confstr", confstr)
        assert not allocator.keep_freed_memory()
        assert not capsys.readouterr().err
    assert allocator.keep_freed_memory()
