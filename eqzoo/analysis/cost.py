"""Multiply-adds of a network, attention included, and its throughput on this machine."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .. import ops  # noqa: F401  registers the operators that are counted here
from ..equivariance import unwrapped, without_parallel
from ..ops._layout import output_side
from ._mode import evaluation_mode

Shape = Sequence[int]
BATCH_SIZE, MIN_SECONDS = 64, 3.0  # of the measurement of throughput


@torch.no_grad()
def multiply_adds(model: nn.Module, input_size: tuple[int, ...] | None = None) -> int:
    """The multiply-adds of one image in evaluation mode.

    Counted are convolutions, products of matrices, and the sums over neighbors in all attention; every term of the
    formulas once, also where a kernel computes it twice to save memory. Not counted are norms, activations, softmax,
    pools and the transformation of filters. Half of what is called FLOPs where a multiply-add is two of them.

    Args:
        model: The network. Its modules keep their modes.
        input_size: The size of an image, ``(C, height, width)``; by default ``model.input_size``.

    Returns:
        The number of multiply-adds.

    Raises:
        ValueError: If no size is given and the network has none.

    Example:
        >>> multiply_adds(nn.Conv2d(3, 8, 3, padding=1), (3, 10, 10))
        21600
    """
    model = without_parallel(model)
    size = getattr(unwrapped(model), "input_size", None) if input_size is None else input_size
    if size is None:
        raise ValueError(f"{type(model).__name__} has no input_size; pass one, (channels, height, width)")
    parameter = next(model.parameters(), torch.empty(0))
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    fused = torch.backends.mha.get_fastpath_enabled()  # torch's transformers in one operation, which is not counted
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with evaluation_mode(model), counter:
            model(torch.zeros(1, *size, dtype=parameter.dtype, device=parameter.device))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops()) // 2


@torch.inference_mode()
def throughput(
    model: nn.Module, input_size: tuple[int, ...], batch_size: int = BATCH_SIZE, min_seconds: float = MIN_SECONDS
) -> dict[str, Any]:
    """Images a second in evaluation mode, by `torch.utils.benchmark`: the median after warm-up, with torch's threads.

    Args:
        model: The network. Its modules keep their modes.
        input_size: The size of an image, ``(C, height, width)``.
        batch_size: The number of images in a batch.
        min_seconds: How long batches are timed, at least.

    Returns:
        ``images_per_second``, ``batch_size``, and ``machine``, with a processor's vectors and the number of threads.
    """
    from torch.utils import benchmark  # which takes time to import

    parameter = next(model.parameters(), torch.empty(0))
    x = torch.randn(batch_size, *input_size, dtype=parameter.dtype, device=parameter.device)
    threads = torch.get_num_threads()
    timer = benchmark.Timer("model(x)", globals={"model": model, "x": x}, num_threads=threads)
    with evaluation_mode(model):
        seconds = timer.blocked_autorange(min_run_time=min_seconds).median
    vectors = f" with {instructions()}" if parameter.is_cpu and instructions() else ""
    return {
        "images_per_second": round(batch_size / seconds, 1),
        "batch_size": batch_size,
        "machine": f"{machine(parameter.device)}{vectors}, {threads} thread{'s' * (threads > 1)}",
    }


def machine(device: torch.device) -> str:
    """The name of the accelerator, or of the processor with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def instructions() -> str:
    """The vectors of the processor, as torch takes them, such as AVX2; empty where torch has no word for them.

    Some names, such as "AMD EPYC", are those of processors of several kinds.
    """
    found = torch.backends.cpu.get_cpu_capability()
    return "" if found in ("DEFAULT", "NO AVX") else found


def versions() -> dict[str, str]:
    """The versions of Python, torch and timm."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "timm": timm.__version__}


def _formulas() -> dict[Any, Callable[..., int]]:
    """The formula for each operator of `eqzoo.ops`, in FLOPs: two for a multiply-add, as torch's counter counts.

    Torch's own attention on a CPU is here too, because releases before 2.15 do not count it.
    """
    own = torch.ops.eqzoo
    return {
        # (batch, heads, tokens, channels)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: (
            2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        ),
        # Those of the expanded convolution.
        own.group_conv2d: lambda _, filters, *__, out_shape, **___: 2 * math.prod(out_shape) * math.prod(filters[1:]),
        own.generated_depthwise: _generated_depthwise,
        own.affine_attention: _affine_attention,
        own.response_peak: lambda x, filters, numbers, **_: (
            2 * _responses(x, filters, numbers) * math.prod(filters[2:])
        ),
        own.response_sum: _response_sum,
        own.suppress: lambda x, *_, **__: 2 * math.prod(x),
        own.local_group_attention: _local_group_attention,
        # The products with Q and its transpose, both 8 x 8.
        own.octic_gelu: lambda ab, e, *_, **__: 2 * 2 * 8 * (math.prod(ab) + math.prod(e)),
    }


def _generated_depthwise(hidden: Shape, weight: Shape, bias: Shape, value: Shape, *_: Any, **kwargs: Any) -> int:
    slices, taps = weight[1:3]
    return 2 * (math.prod(hidden) * slices * taps + math.prod(value) * taps)


def _affine_attention(tensors: Sequence[Tensor], kernel_size: int, *_: Any, **kwargs: Any) -> int:
    field, order, taps = tensors[0].numel(), tensors[0].shape[2], kernel_size**2
    psis = tensors[len(tensors) // 3 :: 2]  # of queries, keys and, where they have one, values
    # An identity, which is no product, is one matrix for all channels and taps.
    maps = sum(order * psi.shape[3] for psi in psis if 0 not in psi.stride())
    return 2 * field * (maps + 2 * taps)


_affine_attention._get_raw = True  # type: ignore[attr-defined]  # torch's counter then passes tensors, not their shapes


def _response_sum(
    x: Shape, filters: Shape, alpha: Shape | None, spatial: Shape | None, numbers: Sequence[int], **kwargs: Any
) -> int:
    responses = _responses(x, filters, numbers)
    channels = filters[1] // numbers[0]
    # With channel attention the responses are counted by response_peak.
    once = math.prod(filters[2:]) if alpha is None else 1
    of_maps = 0 if spatial is None else (1 + 2 * math.prod(spatial[2:])) * responses // channels
    return 2 * (responses * once + of_maps)


def _responses(x: Shape, filters: Shape, numbers: Sequence[int]) -> int:
    """The number of elements of all responses; the numbers are those of the operator, poses and window first."""
    sides = (output_side(side, filters[2], *numbers[1:4]) for side in x[2:])
    return x[0] * filters[0] * filters[1] * math.prod(sides)


def _local_group_attention(qkv: Shape, position: Shape, *_: Any, **kwargs: Any) -> int:
    batch, heads, channels, order, height, width = qkv[0], *qkv[2:]
    parts, poses, taps = position
    # A global window has a tap for every shift, of which each query reads those in the image.
    taps = min(taps, height * width)
    content = order * order * channels
    placed = parts * poses * order
    weights, values = poses * order * order, poses * order * channels
    return 2 * batch * heads * height * width * taps * (content + placed + weights + values)
