"""Benchmarks networks against others: `python training/benchmark.py models`.

Suites: ``models`` times a training step and a prediction, the latter also deployed
(`timm.utils.reparameterize_model`); ``twins`` against plain networks of about as many parameters, each in the faster
of the two memory layouts; ``files`` times ONNX files with convolutions through irreps, and torch, against plain files;
``memory`` is the peak memory of a training step, each in a process of its own. A subject and its baseline run in turn,
so that other load on the machine slows both; the result is the ratio of the medians. Prints a Markdown table;
`--output DIR` writes its numbers as JSON.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from benchmark_cases import FILES, MEMORY, MODELS, TWINS, Case, Subject
from tables import table
from timm.utils import reparameterize_model
from torch import Tensor, nn

import eqzoo
from eqzoo._common import interleaved_times, write_json
from eqzoo.analysis import instructions, machine
from eqzoo.analysis.cost import versions
from eqzoo.engine.allocator import keep_freed_memory
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.ops import use_backend

SUITES = {"models": MODELS, "twins": TWINS, "files": FILES, "memory": MEMORY}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Parses the arguments, measures and prints."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cpu":
        keep_freed_memory()  # as training does; the suite memory runs with settings of its own
    if args.peak_of is not None:
        cases = {case.key: case for case in MEMORY}
        case_key, _, which = args.peak_of.rpartition("/")
        print(peak_memory(getattr(cases[case_key], which), args.batch_size or cases[case_key].batch, args))
        return
    rows = []
    for row in measured(args):
        rows.append(row)
        print(" | ".join(map(str, row.values())), file=sys.stderr, flush=True)
    report = describe(args) | {"rows": rows}
    print(render(report))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        precision = "" if args.dtype == "float32" else f"_{args.dtype}"
        write_json(args.output / f"{args.suite}_{args.device}{precision}.json", report)


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the suite."""
    cases = [case for case in SUITES[args.suite] if args.only in case.key]
    if not cases:
        raise SystemExit(
            f"no case of {args.suite} has {args.only!r} in its name: {', '.join(c.key for c in SUITES[args.suite])}"
        )
    suites = {"memory": compare_memory, "twins": compare_layouts, "files": compare_files}
    for case in cases:
        yield from suites.get(args.suite, compare_time)(case, args)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that have this in their name")
    parser.add_argument("--batch-size", type=int, help="another batch than the cases'")
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each, interleaved (default: 10)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 is autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, help="torch's threads on a CPU")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the processor, without what other processes take of it"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a folder for <suite>_<device>[_<dtype>].json")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)  # how the memory suite calls itself in a fresh process
    return parser.parse_args()


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the options of the measurement."""
    return {
        "suite": args.suite,
        "machine": machine(torch.device(args.device)),
        "instructions": instructions() if args.device == "cpu" else "",
        "threads": torch.get_num_threads(),
        "versions": versions() | {"eqzoo": eqzoo.__version__},
        "rounds": args.rounds,
        "dtype": args.dtype,
        "channels_last": args.channels_last,
        "cpu_time": args.cpu_time,
    }


def compare_time(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a subject against its baseline: a row a task."""
    batch = args.batch_size or case.batch
    pair = {"ours": case.ours, "theirs": case.theirs}
    tasks: dict[str, Callable[[Subject], Callable[[], None]]] = {
        "training step": partial(training_step, batch=batch, args=args),
        "inference": partial(inference, batch=batch, args=args, deployed=False),
    }
    if case.deploys:
        tasks["inference, deployed"] = partial(inference, batch=batch, args=args, deployed=True)
    for task, prepare in tasks.items():
        seconds = times({key: prepare(subject) for key, subject in pair.items()}, args)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["theirs"], strict=True)]
        yield {
            "subject": case.ours.name,
            "against": case.theirs.name,
            "task": task,
            "batch": batch,
            "ms": round(1e3 * medians["ours"], 2),
            "ms against": round(1e3 * medians["theirs"], 2),
            "ratio": round(medians["ours"] / medians["theirs"], 3),
            "median of ratios": round(statistics.median(ratios), 3),
        }


def times(steps: Mapping[Any, Callable[[], object]], args: argparse.Namespace) -> dict[Any, list[float]]:
    """The seconds of every run of the steps, in interleaved rounds, by the clock of the options."""
    return interleaved_times(steps, args.rounds, clock=process_time if args.cpu_time else None)


def compare_layouts(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a subject and its baseline, each in both layouts: a row a task, of the medians of the faster layouts."""
    forms = {"ours": case.ours, "theirs": case.theirs}
    for task, batch in (("inference", 8), ("training step", case.batch)):
        batch = args.batch_size or batch
        prepare = training_step if task == "training step" else partial(inference, deployed=False)
        steps = {
            (key, last): prepare(replace(subject, channels_last=last), batch, args)
            for key, subject in forms.items()
            for last in (False, True)
        }
        medians = {key: statistics.median(values) for key, values in times(steps, args).items()}
        best = {key: min((medians[key, last], last) for last in (False, True)) for key in forms}
        layouts = {key: "channels last" if last else "contiguous" for key, (_, last) in best.items()}
        yield {
            "subject": case.ours.name,
            "against": case.theirs.name,
            "task": task,
            "batch": batch,
            "ms": round(1e3 * best["ours"][0], 2),
            "layout": layouts["ours"],
            "ms against": round(1e3 * best["theirs"][0], 2),
            "layout against": layouts["theirs"],
            "ratio": round(best["ours"][0] / best["theirs"][0], 3),
        }


def compare_files(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a network's ONNX file through irreps, and the network in torch, against its file of plain convolutions."""
    model = case.ours.build().eval()
    with tempfile.TemporaryDirectory() as folder:
        paths = (
            eqzoo.export_onnx(model, Path(folder) / f"{irreps}.onnx", irreps=irreps).path for irreps in (True, False)
        )
        irreps, plain = (OnnxFile(path, torch.get_num_threads()) for path in paths)
    for batch in (1, args.batch_size or case.batch):
        images = torch.randn(batch, *case.ours.input_shape)
        steps = {
            "irreps": partial(irreps, images),
            "plain": partial(plain, images),
            "torch": inference(case.ours, batch, args, deployed=False),
        }
        medians = {key: statistics.median(values) for key, values in times(steps, args).items()}
        yield {
            "subject": case.ours.name,
            "against": case.theirs.name,
            "batch": batch,
            "ms": round(1e3 * medians["irreps"], 2),
            "ms in torch": round(1e3 * medians["torch"], 2),
            "ms against": round(1e3 * medians["plain"], 2),
            "ratio": round(medians["irreps"] / medians["plain"], 3),
            "ratio in torch": round(medians["torch"] / medians["plain"], 3),
        }


def build(subject: Subject, batch: int, args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The module and a batch for it, on the device, from a fixed seed."""
    torch.manual_seed(0)
    last = args.channels_last or subject.channels_last
    memory_format = torch.channels_last if last else torch.contiguous_format
    module = subject.build().to(args.device, memory_format=memory_format)
    x = torch.randn(batch, *subject.input_shape, device=args.device)
    return module, x.to(memory_format=memory_format)


def training_step(subject: Subject, batch: int, args: argparse.Namespace) -> Callable[[], None]:
    """Forward, backward and an Adam step."""
    module, x = build(subject, batch, args)
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-5)
    labels = torch.zeros(batch, dtype=torch.int64, device=args.device)

    def step() -> None:
        with use_backend(subject.backend), autocast(args):
            loss = F.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(subject: Subject, batch: int, args: argparse.Namespace, deployed: bool) -> Callable[[], None]:
    """A forward pass in evaluation mode."""
    module, x = build(subject, batch, args)
    module = copy.deepcopy(module).eval()
    if deployed:
        module = reparameterize_model(module)

    @torch.inference_mode()
    def step() -> None:
        with use_backend(subject.backend), autocast(args):
            module(x)

    return step


def autocast(args: argparse.Namespace) -> torch.autocast:
    """The precision of the options."""
    kind = torch.device(args.device).type
    return torch.autocast(kind, DTYPES[args.dtype], enabled=args.dtype != "float32")


def compare_memory(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compares the peak memory of a training step of a subject and of its baseline."""
    batch = args.batch_size or case.batch
    options = [f"--device={args.device}", f"--dtype={args.dtype}", f"--batch-size={batch}"]
    options += ["--channels-last"] * args.channels_last
    options += [f"--threads={args.threads}"] * bool(args.threads)
    peaks = {}
    for which in ("ours", "theirs"):
        command = [sys.executable, __file__, "memory", f"--peak-of={case.key}/{which}", *options]
        # Freed memory is returned at once: memory kept from the step before would hide what this one allocates.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{case.key}: {ran.stderr.strip()[-2000:]}")
        peaks[which] = float(ran.stdout)
    yield {
        "subject": case.ours.name,
        "against": case.theirs.name,
        "batch": batch,
        "GB": round(peaks["ours"] / 1e9, 3),
        "GB against": round(peaks["theirs"] / 1e9, 3),
        "ratio": round(peaks["ours"] / peaks["theirs"], 3),
    }


def peak_memory(subject: Subject, batch: int, args: argparse.Namespace) -> float:
    """The peak memory of the first training step, in bytes: the allocator's on a GPU, else the resident growth.

    Weights and the batch are there before; gradients and the optimizer's averages are part of the peak.
    """
    training_step(subject, 2, args)()  # loads libraries and builds kernels
    step = training_step(subject, batch, args)
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak to what is resident now
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def render(report: dict[str, Any]) -> str:
    """The report as a Markdown table below a line on machine, versions and options."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    layout = "channels last, " if report["channels_last"] else "" if report["suite"] == "twins" else "contiguous, "
    kind = (
        "Peak of one training step"
        if report["suite"] == "memory"
        else f"Medians of {report['rounds']} interleaved runs{', time of the processor' * report['cpu_time']}"
    )
    how = f"{report['dtype']}, {layout}eager"
    with_instructions = f" with {report['instructions']}" if report.get("instructions") else ""
    where = f"{report['machine']}{with_instructions}, {report['threads']} thread{'s' * (report['threads'] > 1)}"
    columns = list(report["rows"][0])
    precision = "" if report["dtype"] == "float32" else f", {report['dtype']}"
    title = f"# {report['suite'].capitalize()}{precision}, measured"
    rows = ([row[column] for column in columns] for row in report["rows"])
    return f"{title}\n\n{kind}; {how}. {where}; {versions}.\n\n{table(columns, rows)}"


if __name__ == "__main__":
    main()
