"""Reads the test split once, for a finished run: `python training/evaluate.py runs/p4_cnn.rotmnist/seed0`.

Writes `results.json` into the run's folder: what the card, the README's table and the Hub show comes from there.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import timm
import torch
from common import add_data_arguments, read_splits

import eqzoo
from eqzoo.data import Split, normalise
from eqzoo.engine import Recipe, predictions, top1
from eqzoo.files import atomic
from eqzoo.groups import P4, transform


def main() -> None:
    """Parses, evaluates and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_data_arguments(parser)
    args = parser.parse_args()

    recipe, rows = read_run(args.run)
    model = eqzoo.create_model(recipe.model, checkpoint_path=args.run / "best.safetensors", **recipe.model_args)
    splits = read_splits(recipe.dataset, args)
    results = evaluate(model.to(args.device).eval(), recipe, rows, splits)
    results["weights_sha256"] = hashlib.sha256((args.run / "best.safetensors").read_bytes()).hexdigest()
    text = json.dumps(results, indent=2) + "\n"
    atomic(args.run / "results.json", lambda path: path.write_text(text))
    print(text)


def read_run(run: Path) -> tuple[Recipe, list[dict[str, Any]]]:
    """The recipe and the record of a finished run."""
    recipe = Recipe(**json.loads((run / "recipe.json").read_text()))
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    if len(rows) < recipe.epochs:
        raise SystemExit(f"{run} has {len(rows)} of {recipe.epochs} epochs; train.py goes on with it")
    return recipe, rows


def evaluate(
    model: eqzoo.models.EquivariantNet, recipe: Recipe, rows: list[dict[str, Any]], splits: dict[str, Split]
) -> dict[str, Any]:
    """The results of a run, as results.json holds them; percentages are of the split named."""
    best = max(rows, key=lambda row: (row["valid_accuracy"], row["epoch"]))
    turned = quarter_turns(model, splits["test"])
    accuracy = top1(turned[0], splits["test"].labels)
    return {
        "checkpoint": f"{recipe.model}.{recipe.dataset}",
        "group": model.group.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dataset": {"name": recipe.dataset} | {name: len(split) for name, split in splits.items()},
        "seeds": 1,
        "command": f"python training/train.py {recipe.model}.{recipe.dataset} --seed {recipe.seed}",
        "recipe": dataclasses.asdict(recipe),
        "selected_epoch": best["epoch"],
        "valid_error": round(100 - best["valid_accuracy"], 3),
        "test_error": round(100 - accuracy, 3),
        "test_error_of_turned_copies": [round(100 - top1(t, splits["test"].labels), 3) for t in turned],
        "same_class_at_all_quarter_turns": round(100 * (turned == turned[0]).all(0).double().mean().item(), 3),
        "equivariance_error": eqzoo.equivariance_error(model),
        "equivariance_error_p4": eqzoo.equivariance_error(model, group=P4),
        "training_seconds": round(sum(row["seconds"] for row in rows)),
        "machine": machine(next(model.parameters()).device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "eqzoo": eqzoo.__version__,
        },
    }


def quarter_turns(model: eqzoo.models.EquivariantNet, split: Split) -> torch.Tensor:
    """The classes of all pictures and of their quarter turns, ``(4, n)``, in float32."""
    cfg, parameter = model.pretrained_cfg, next(model.parameters())
    images = normalise(split.images.to(parameter.device), cfg["mean"], cfg["std"], torch.float32)
    return torch.stack([predictions(model, transform(images, P4, g, "trivial")).cpu() for g in P4.elements])


def machine(device: torch.device) -> str:
    """What the numbers were made on: the accelerator, or the processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
