"""`eqzoo bench`: latency and throughput on this machine."""

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from .._common import interleaved_times
from ..analysis.cost import machine
from ..analysis.sizes import check_side
from ..models import EquivariantNet, OrbitNet, list_models
from ..models.load import load_network, resolve
from ._answer import Answer, table


@dataclass(frozen=True)
class _Images:
    """The images that networks are timed on.

    Args:
        device: Where they are.
        side: Their side in pixels; None for that of each network.
        channels_last: Whether they lie in memory channels last.
        bfloat16: Whether networks compute in bfloat16, by autocast.
    """

    device: torch.device
    side: int | None
    channels_last: bool
    bfloat16: bool

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def batch(self, model: EquivariantNet | OrbitNet, size: int) -> Tensor:
        channels, *sides = model.input_size
        x = torch.randn(size, channels, *([self.side, self.side] if self.side else sides), device=self.device)
        # Not contiguous(), which leaves an image of one channel with strides that no field is taken from.
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


def run(args: argparse.Namespace) -> Answer:
    """Times networks as they are, deployed and compiled, in interleaved runs."""
    sizes = args.batch_sizes or [1, 32]
    images = _Images(_device(args.device), args.size, args.channels_last, args.precision == "bfloat16")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads)
    try:
        names = list(dict.fromkeys(args.names))
        twins = {name: args.against or _twin(name) for name in names}
        timed = list(dict.fromkeys([*names, *(twin for twin in twins.values() if twin)]))
        if args.size:
            for name in timed:
                check_side(resolve(name), args.size)
        with nullcontext() if args.no_compile else _recompilations(len(timed) * len(sizes)):
            forms, notes = _forms(timed, images, [] if args.no_compile else sizes)
            entries = [row for size in sizes for row in _clock(forms, size, images, args.rounds)]
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    if args.channels_last and not args.no_compile and 1 in sizes:
        notes.append("Compiled for one image, networks of this package do not use channels last.")
    times = {(row["network"], row["form"], row["batch"]): row["seconds"] for row in entries}
    for row in entries:
        twin = twins.get(row["network"])
        plain = times.get((twin, row["form"], row["batch"]))
        row |= {"against": twin if plain else None, "ratio": row["seconds"] / plain if plain else None}
    data = {
        "machine": machine(images.device),
        "threads": used,
        "torch": torch.__version__,
        "rounds": args.rounds,
        "precision": args.precision,
        "channels_last": args.channels_last,
        "rows": entries,
        "notes": notes,
    }
    return Answer(_text(data), data)


def _recompilations(programs: int) -> AbstractContextManager[None]:
    """Gives each program the compilations that torch allows for one function; one more is an error.

    Networks share the code of their ``forward``. Beyond its limit torch would run them as they are, without a word.
    """
    limits = torch._dynamo.config
    own: AbstractContextManager[None] = limits.patch(
        recompile_limit=limits.recompile_limit * programs,
        accumulated_recompile_limit=limits.accumulated_recompile_limit * programs,
        fail_on_recompile_limit_hit=True,
    )
    return own


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _twin(name: str) -> str | None:
    """The network of the same name for the group z2, translations alone."""
    model = resolve(name).architecture
    twin = f"z2_{model.partition('_')[2]}"
    return twin if twin in list_models() and twin != model else None


def _forms(
    names: Sequence[str], images: _Images, sizes: Sequence[int]
) -> tuple[dict[tuple[str, str], nn.Module], list[str]]:
    """Every network in each form, compiled for each batch size; a note for each that does not compile."""
    forms: dict[tuple[str, str], nn.Module] = {}
    notes = []
    for name in names:
        torch.manual_seed(0)
        model: EquivariantNet | OrbitNet = load_network(name, pretrained=False).network.to(images.device)
        forms[name, "eager"] = model
        forms[name, "deployed"] = deployed = reparameterize_model(copy.deepcopy(model))
        if not sizes:
            continue
        print(f"compiling {name} ...", file=sys.stderr, flush=True)
        run: Any = torch.compile(deployed, dynamic=False)
        try:
            with torch.inference_mode(), images.autocast():
                for size in sizes:
                    run(images.batch(model, size))
            forms[name, "compiled"] = run
        except Exception as error:  # every backend raises its own: without a compiler, without Triton
            hit = isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)
            said = "torch's limit of recompilations" if hit else str(error).strip().splitlines()[0]
            notes.append(f"{name} does not compile here: {said}")
            torch._dynamo.reset()
    return forms, notes


@torch.inference_mode()
def _clock(forms: dict[tuple[str, str], nn.Module], size: int, images: _Images, rounds: int) -> list[dict[str, Any]]:
    """Times all forms in interleaved runs, after two rounds of warm-up."""
    print(f"timing {len(forms)} forms at batch {size} ...", file=sys.stderr, flush=True)
    batches = {key: images.batch(cast(EquivariantNet, forms[key[0], "eager"]), size) for key in forms}
    gpu = images.device if images.device.type == "cuda" else -1
    with torch.cuda.device(gpu), images.autocast():  # the clock waits for the current GPU
        seconds = interleaved_times({key: partial(form, batches[key]) for key, form in forms.items()}, rounds)
    return [
        {
            "network": name,
            "form": form,
            "batch": size,
            "image": tuple(batches[name, form].shape[1:]),
            "seconds": statistics.median(times),
            "images_per_second": size / statistics.median(times),
        }
        for (name, form), times in seconds.items()
    ]


def _text(data: dict[str, Any]) -> str:
    heading = ["network", "form", "batch", "ms", "images/s", "time ratio"]
    rows = [
        [
            row["network"],
            row["form"],
            str(row["batch"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{row['images_per_second']:,.0f}",
            f"{row['ratio']:.2f} x {row['against']}" if row["ratio"] else "",
        ]
        for row in data["rows"]
    ]
    machine = f"{data['machine']}, torch's threads: {data['threads']}, torch {data['torch']}"
    images = sorted({" x ".join(map(str, row["image"])) for row in data["rows"]})
    layout = "channels last" if data["channels_last"] else "contiguous"
    how = f"images of {' and '.join(images)}, {data['precision']}, {layout}"
    made = f"Medians of {data['rounds']} interleaved runs, {how}; {machine}."
    return "\n\n".join([table([heading, *rows], right={2, 3, 4}, flexible=5), "\n".join([made, *data["notes"]])])
