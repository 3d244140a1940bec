"""Freed memory stays with a process that trains on a CPU: where it should, and only there."""

import os
import platform
import shutil
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


@glibc
@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}],
    ids=lambda env: next(iter(env)),
)
def test_who_chose_otherwise_keeps_it(env):
    """Without the settings there are many page faults, as above."""
    kept, faults, said = churn(**env)
    assert not kept
    assert faults > 10_000
    assert not said


# An allocator that takes from one large block and never returns anything.
OTHER = """
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
static char *next;
static void *take(size_t alignment, size_t size) {
  if (!next) next = mmap(0, 1l << 34, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *block = (char *)(((size_t)next + 16 + alignment - 1) / alignment * alignment);
  ((size_t *)block)[-1] = size;
  next = block + size;
  return block;
}
void *malloc(size_t size) { return take(16, size); }
void *calloc(size_t count, size_t size) { return take(16, count * size); }
void *memalign(size_t alignment, size_t size) { return take(alignment, size); }
void *aligned_alloc(size_t alignment, size_t size) { return take(alignment, size); }
int posix_memalign(void **block, size_t alignment, size_t size) { *block = take(alignment, size); return 0; }
void *realloc(void *old, size_t size) {
  void *block = take(16, size);
  if (old) memcpy(block, old, ((size_t *)old)[-1] < size ? ((size_t *)old)[-1] : size);
  return block;
}
void free(void *block) {}
"""


@glibc
@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler of C")
def test_an_allocator_that_is_loaded_before_glibc_is_recognized(tmp_path):
    (tmp_path / "other.c").write_text(OTHER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    # The file alone: the allocator above is not for threads.
    code = f"import runpy; print(runpy.run_path({allocator.__file__!r})['_is_glibc']())"
    for preload, found in ("", "True"), (str(tmp_path / "other.so"), "False"):
        env = dict(os.environ, LD_PRELOAD=preload)
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == [found]


def test_another_allocator_is_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(allocator, "_is_glibc", lambda: False)
    monkeypatch.setattr(allocator, "_done", False)
    monkeypatch.setattr(allocator, "_mallopt", pytest.fail)
    assert not allocator.keep_freed_memory()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("raised", [ValueError, OSError, AttributeError])
def test_systems_without_glibc_are_recognized(monkeypatch, raised):
    def confstr(name):
        raise raised(name)

    monkeypatch.setattr("os.confstr", confstr, raising=False)
    assert not allocator._is_glibc()
