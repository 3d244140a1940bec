"""Times networks against plain ones: `python training/benchmark.py`.

A network and the same network made of plain convolutions with the expanded filters (what
`timm.utils.reparameterize_model` gives) run in turns, so that both meet the same weather; the ratio of the two medians
is what counts. Prints a Markdown table and writes the same as JSON with `--output`.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from evaluate import machine
from timm.utils import reparameterize_model
from torch import Tensor, nn

import eqzoo
from eqzoo.files import atomic


def main() -> None:
    """Parses, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["p4_cnn", "p4_cnn_w19", "p4m_cnn"], metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each, in turns")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    args = parser.parse_args()

    device = torch.device(args.device)
    rows = [
        row for name in args.model for row in compare(name, args.batch_size, args.rounds, device, args.channels_last)
    ]
    report = {
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "eqzoo": eqzoo.__version__},
        "batch_size": args.batch_size,
        "rounds": args.rounds,
        "channels_last": args.channels_last,
        "rows": rows,
    }
    print(render(report))
    if args.output:
        atomic(args.output, lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))


def compare(name: str, batch_size: int, rounds: int, device: torch.device, channels_last: bool) -> list[dict[str, Any]]:
    """Times a network against its plain twin: a training step, and a forward pass in evaluation mode."""
    torch.manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = eqzoo.create_model(name).to(device, memory_format=memory_format)
    plain = reparameterize_model(model).to(memory_format=memory_format)
    x = torch.randn(batch_size, *model.input_size, device=device).to(memory_format=memory_format)
    labels = torch.randint(model.num_classes, (batch_size,), device=device)
    networks = {"eqzoo": model, "plain": plain}
    tasks = {
        "training step": {key: training_step(network, x, labels) for key, network in networks.items()},
        "inference": {key: inference(copy.deepcopy(network), x) for key, network in networks.items()},
    }
    rows = []
    for task, steps in tasks.items():
        seconds = in_turns(steps, rounds, device)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        ratios = [ours / theirs for ours, theirs in zip(seconds["eqzoo"], seconds["plain"], strict=True)]
        rows.append(
            {
                "model": name,
                "task": task,
                "eqzoo_ms": round(1e3 * medians["eqzoo"], 2),
                "plain_ms": round(1e3 * medians["plain"], 2),
                "ratio": round(medians["eqzoo"] / medians["plain"], 3),
                "median_of_ratios": round(statistics.median(ratios), 3),
            }
        )
    return rows


def training_step(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward, backward and an Adam step."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward pass in evaluation mode."""
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(x)

    return step


def in_turns(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Runs all steps one after the other, ``rounds`` times after three warm-up rounds; seconds of every run."""
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(rounds + 3):
        # Who goes first changes with every round, so that neither has the warmer cache.
        for key in sorted(steps, reverse=bool(turn % 2)):
            began = time.perf_counter()
            steps[key]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 3:
                seconds[key].append(time.perf_counter() - began)
    return seconds


def render(report: dict[str, Any]) -> str:
    """The report as a Markdown table with what it was made on."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"Medians of {report['rounds']} runs in turns, batch {report['batch_size']}, "
        f"{'channels last' if report['channels_last'] else 'contiguous'}, float32. {report['machine']}, "
        f"{report['threads']} threads; {versions}.",
        "",
        "| model | task | eqzoo, ms | plain, ms | ratio | median of ratios |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        lines.append("| " + " | ".join(str(value) for value in row.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
