"""Triton kernels compile for GPUs that are not at hand, without register spills and within their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = Path(__file__).with_name("triton_compile.py")
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a block may have: A100, H100
QUICK = ("e4", "gsa, lifting")


def compiled(capability, *cases):
    """The resources of the kernels; in a process of its own, as Triton interprets them in this one."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, SCRIPT, str(capability), *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check(kernels, capability):
    assert kernels
    assert not [kernel for kernel in kernels if kernel["stack"]], "registers are spilled to the stack"
    assert all(kernel["shared"] <= SHARED[capability] for kernel in kernels)


def test_kernels_compile_for_an_h100():
    kernels = compiled(90, *QUICK)
    assert len(kernels) >= 7  # three of E4 and four of GSA
    check(kernels, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_all_kernels_compile(capability):
    kernels = compiled(capability)
    assert len({kernel["kernel"] for kernel in kernels}) == 4 + 9 + 2 + 4
    check(kernels, capability)


@pytest.mark.slow
def test_a_spill_is_noticed():
    """Negative control: half of the threads, and so twice the numbers for each."""
    with pytest.raises(AssertionError, match="spilled"):
        check(compiled(90, "too few warps"), 90)
