"""`eqzoo evaluate`: the metrics of a network on labeled images."""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..data import AnySplit, labeled_images, native_sides
from ..engine.advice import cut_off
from ..engine.digests import SPLIT_NAMES, image_codes
from ..engine.loop import check_device
from ..engine.metrics import evaluate
from ..engine.run_directory import RunDirectory
from ..models.loading import LoadedNetwork, load_network
from ._answer import Answer, table
from ._metrics import class_rows, confusion_rows, metric_rows

__all__ = ["run"]

_NAMES = SPLIT_NAMES | {"val": SPLIT_NAMES["valid"]}


def run(args: argparse.Namespace) -> Answer:
    """Prints accuracy, scores of each class and the confusion matrix."""
    check_device(args.device)
    if args.workers < 0:
        raise ValueError(f"--workers is a number of processes, 0 or more, got {args.workers}")
    if args.rotated < 1:
        raise ValueError(f"--rotated is a number of images, 1 or more, got {args.rotated}")
    loaded = load_network(args.name, pretrained=True)
    model, names = loaded.network, _names(loaded)
    channels, height, width = model.input_size
    if height != width:
        raise ValueError(f"{args.name} takes images of {height} x {width} pixels, and eqzoo evaluate reads square ones")
    read, part = labeled_images(args.data, width, channels, args.split, args.data_dir, args.download)
    split, notes = _relabeled(read, names, args.data, loaded)
    notes += [*_trained_on(read, loaded), *cut_off(native_sides(args.data))]
    model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = evaluate(model, split, names, workers=args.workers, rotated=args.rotated)
    count = f"{len(split):,}{f' {_NAMES[part]} images' if part else ''} of {args.data}"
    rows = [["network", loaded.name], ["images", count], *metric_rows(found)]
    parts = [table(rows, flexible={1}), table(class_rows(found["classes"]), right=range(1, 5))]
    if confusion := confusion_rows(found):
        parts.append(table(confusion, right=range(1, len(names) + 1)))
    data = {"network": loaded.name, "data": args.data, "split": part, "images": len(split), "notes": notes} | found
    return Answer("\n\n".join([*parts, *notes]), data)


def _names(loaded: LoadedNetwork) -> tuple[str, ...]:
    """The names of the classes that the network predicts."""
    count = loaded.network.num_classes
    if not count:
        raise ValueError(f"{loaded.name} has no classifier, so it predicts nothing; eqzoo finetune trains one")
    return tuple(loaded.network.pretrained_cfg.get("label_names") or map(str, range(count)))


def _relabeled(split: AnySplit, names: tuple[str, ...], data: str, loaded: LoadedNetwork) -> tuple[AnySplit, list[str]]:
    """The split with the labels of the network, matched by name, or by number where the data has no names."""
    labels = split.labels
    if split.classes:
        if unknown := [name for i, name in enumerate(split.classes) if name not in names and (labels == i).any()]:
            raise ValueError(
                f"{data} has images of {', '.join(map(repr, unknown[:5]))}{', ...' * (len(unknown) > 5)}, which "
                f"{loaded.name} does not predict: its classes are {', '.join(map(repr, names[:12]))}"
                f"{', ...' * (len(names) > 12)}; give the classes the same names, such as of their folders, or leave "
                "their images out"
            )
        numbers = [names.index(name) if name in names else 0 for name in split.classes]
        return replace(split, labels=torch.tensor(numbers)[labels], classes=names), []
    if int(labels.max()) >= len(names):
        raise ValueError(f"{data} has labels up to {int(labels.max())}, and {loaded.name} has {len(names)} classes")
    named = loaded.network.pretrained_cfg.get("label_names")
    note = f"the labels of {data} have no names: 0 is taken for {names[0]!r}, and so on in the network's order"
    return replace(split, classes=names), [note] if named else []


def _trained_on(split: AnySplit, loaded: LoadedNetwork) -> list[str]:
    """A note where the network was fine-tuned on some of the images."""
    if not loaded.source.folder:
        return []
    count = int(np.isin(image_codes(split), RunDirectory(Path(loaded.source.folder)).trained()).sum())
    if not count:
        return []
    return [f"{loaded.name} was trained on {count:,} of these {len(split):,} images, so the metrics are too good"]
