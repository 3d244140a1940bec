"""Compiles Triton kernels for a GPU that is not there: ``python triton_compile.py CAPABILITY [CASE ...]``.

The launching code runs on CPU tensors with a driver that stands for the GPU, so that kernels are specialized and
configured as in a launch. Prints a line of JSON for each kernel: its name, registers and stack bytes a thread, and
shared memory in bytes. Must run without TRITON_INTERPRET, which is read when Triton is imported.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eqzoo.ops.asc import cuda as affine_attention
from eqzoo.ops.asc import cuda_half as affine_attention_half
from eqzoo.ops.attentive import cuda as attentive_conv
from eqzoo.ops.e4 import cuda as depthwise
from eqzoo.ops.gsa import cuda as local_group_attention

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGPU:
    """The part of Triton's driver that compilation needs."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def generated_depthwise(dtype, order, shared, side, pixels):
    """The three kernels of E4, for ``shared`` channels that share a filter."""
    kernel = torch.zeros(1, 2, order, side**2, *pixels, dtype=dtype)
    value = torch.zeros(1, 2 * shared, order, *pixels, dtype=dtype)
    depthwise.filtered_sum(kernel, value, value)
    depthwise.field_gradient(kernel, value, value)
    depthwise.filter_gradient(value, value, kernel)


def affine(dtype, order, channels, heads, side, pixels, values):
    """The four kernels of ASC."""
    shapes = [(1, channels, order, *pixels)] * (3 if values else 2)
    for taps in (1, side**2, side**2)[: len(shapes)]:
        shapes += [(channels, order, order, taps), (channels, order, taps)]
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    affine_attention.forward(tensors, side, heads, 0.1)
    affine_attention.backward(torch.zeros_like(tensors[0]), tensors, side, heads, 0.1)


def affine_half(order, channels, heads, side, pixels):
    """The four kernels of ASC in half precision."""
    shapes = [(1, channels, order, *pixels)] * 3
    for taps in (1, side**2, side**2):
        shapes += [(channels, order, order, taps), (channels, order, taps)]
    tensors = [torch.zeros(shape, dtype=HALF if len(shape) == 5 else SINGLE) for shape in shapes]
    affine_attention_half.forward(tensors, side, heads, 0.1)
    affine_attention_half.backward(torch.zeros_like(tensors[0]), tensors, side, heads, 0.1)


def attentive(dtype, order, channels, side, pixels, spatial):
    """The nine kernels of attentive convolutions."""
    x = torch.zeros(2, channels * order, *pixels, dtype=dtype)
    filters = torch.zeros(channels * order, channels * order, side, side, dtype=dtype)
    psi = torch.zeros(channels * order, 2 * order, 7, 7, dtype=dtype) if spatial else None
    sampling = (order, 1, side // 2, 1)
    shape = (2, order, channels, channels * order)
    peak, where = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int32)
    attentive_conv.response_peak(x, filters, peak, where, *sampling)
    attentive_conv.response_peak_backward(peak, x, filters, where, *sampling)
    y = torch.zeros_like(x)
    attentive_conv.response_sum(x, filters, peak, psi, y, *sampling, 1)
    attentive_conv.response_sum_backward(y, x, filters, peak, psi, *sampling, 1)


def local_attention(dtype, order, outputs, channels, window, pixels, dropout=0.1):
    """The four kernels of group self-attention: ``order`` poses in, ``outputs`` poses out."""
    qkv = torch.zeros(1, 3, 2, channels, order, *pixels, dtype=dtype)
    third = channels // 3
    position = torch.zeros(2 * third if order > 1 else channels, outputs, window**2, dtype=dtype)
    pose = torch.zeros(channels - 2 * third, order, order, dtype=dtype) if order > 1 else None
    given = (qkv, position, pose, torch.zeros(1, dtype=torch.int64) if dropout else None)
    out = local_group_attention.forward(*given, (window, window), 0.1, dropout)
    local_group_attention.backward(out, *given, (window, window), 0.1, dropout)


def too_few_warps():
    """Negative control: tiles that do not fit the registers of so few threads."""
    attentive_conv._WARPS = 2
    attentive(SINGLE, 4, 10, 3, (24, 24), True)


HALF, SINGLE = torch.bfloat16, torch.float32
CASES = {
    "e4": lambda: generated_depthwise(SINGLE, 4, 8, 5, (28, 28)),
    "e4, bfloat16": lambda: generated_depthwise(HALF, 4, 8, 5, (28, 28)),
    "e4, p4m": lambda: generated_depthwise(SINGLE, 8, 3, 3, (7, 7)),
    "asc": lambda: affine(SINGLE, 4, 16, 8, 5, (16, 16), True),
    "asc, bfloat16": lambda: affine(HALF, 4, 32, 8, 5, (32, 32), True),
    "asc, p4m": lambda: affine(SINGLE, 8, 24, 6, 5, (16, 16), True),
    "asc, simple": lambda: affine(SINGLE, 4, 16, 8, 5, (16, 16), False),
    "asc, half": lambda: affine_half(4, 8, 8, 5, (32, 32)),
    "asc, half, p4m": lambda: affine_half(8, 24, 6, 5, (16, 16)),
    "asc, z2": lambda: affine(SINGLE, 1, 32, 8, 7, (32, 32), True),
    "attentive": lambda: attentive(SINGLE, 4, 10, 3, (24, 24), True),
    "attentive, bfloat16": lambda: attentive(HALF, 4, 10, 3, (24, 24), True),
    "attentive, p4m": lambda: attentive(SINGLE, 8, 7, 5, (13, 13), True),
    "attentive, channels alone": lambda: attentive(SINGLE, 4, 10, 3, (24, 24), False),
    "gsa": lambda: local_attention(SINGLE, 4, 4, 10, 5, (28, 28)),
    "gsa, bfloat16": lambda: local_attention(HALF, 4, 4, 10, 5, (28, 28)),
    "gsa, r8": lambda: local_attention(SINGLE, 8, 8, 10, 5, (28, 28)),
    "gsa, r16": lambda: local_attention(SINGLE, 16, 16, 10, 5, (28, 28)),
    "gsa, lifting": lambda: local_attention(SINGLE, 1, 4, 10, 5, (28, 28), 0.0),
}
CONTROLS = {"too few warps": too_few_warps}


def main(capability, *names):
    """Compiles the cases and prints the resources of their kernels."""
    driver.set_active(AbsentGPU(int(capability)))
    compiled, run = {}, JITFunction.run

    def compile_alone(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel

    JITFunction.run = compile_alone
    for name in names or CASES:
        (CASES | CONTROLS)[name]()
    for kernel in compiled.values():
        print(json.dumps(resources(kernel)), flush=True)


def resources(kernel):
    """Registers and stack a thread, and shared memory a block, read from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return {
        "kernel": kernel.metadata.name,
        "registers": usage["REG"],
        "stack": usage["STACK"] + usage["LOCAL"],
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
