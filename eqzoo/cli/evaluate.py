"""`eqzoo evaluate`: the metrics of a network on labeled images."""

import argparse
import time
from dataclasses import replace

import torch

from ..analysis.rotation import sample
from ..data import AnySplit, read_images
from ..engine.metrics import evaluate, predict_split
from ..models import EquivariantNet
from ..models.loading import LoadedNetwork, load_network
from ._answer import Answer, table
from ._metrics import class_rows, confusion_rows, metric_rows

__all__ = ["run"]

_TIMED = 64  # images, by which the time for all is estimated
_SECONDS = 30  # that rotated images may take at least; of many images as long as these unrotated
_PARTS = ("test", "valid", "train")  # the first that there is


def run(args: argparse.Namespace) -> Answer:
    """Prints accuracy, scores of each class and the confusion matrix."""
    loaded = load_network(args.name, pretrained=True)
    model = loaded.network
    side = model.input_size[-1]
    splits = read_images(args.data, side, model.in_chans, args.data_dir, args.download)
    part = args.split or next(name for name in _PARTS if name in splits)
    if part not in splits:
        raise ValueError(f"{args.data} has no {part} images, only {' and '.join(splits)}; leave --split out")
    names = _names(loaded)
    split = _relabeled(splits[part], names, args)
    model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    found = evaluate(model, split, names, workers=args.workers, seconds=_time(model, split, args.workers))
    count = f"{len(split):,}{f' {part} images' if len(splits) > 1 else ''} of {args.data}"
    rows = [["network", loaded.name], ["images", count], *metric_rows(found)]
    parts = [table(rows, flexible={1}), table(class_rows(found["classes"]), right=range(1, 5))]
    if confusion := confusion_rows(found):
        parts.append(table(confusion, right=range(1, len(names) + 1)))
    return Answer("\n\n".join(parts), {"network": loaded.name, "data": args.data, "split": part} | found)


def _time(model: EquivariantNet, split: AnySplit, workers: int) -> float:
    """The seconds for all images, and for rotated ones as much again."""
    few = sample(split, _TIMED)
    began = time.perf_counter()
    predict_split(model, few, workers)
    seconds = (time.perf_counter() - began) / len(few) * len(split)
    return seconds + max(seconds, _SECONDS)


def _names(loaded: LoadedNetwork) -> tuple[str, ...]:
    """The names of the classes that the network predicts."""
    count = loaded.network.num_classes
    if not count:
        raise ValueError(f"{loaded.name} has no classifier, so it predicts nothing; eqzoo finetune trains one")
    return tuple(loaded.network.pretrained_cfg.get("label_names") or map(str, range(count)))


def _relabeled(split: AnySplit, names: tuple[str, ...], args: argparse.Namespace) -> AnySplit:
    """The split with the labels of the network: classes are matched by name, and by number where the data has none."""
    labels = split.labels
    if split.classes:
        if unknown := [name for name in split.classes if name not in names]:
            raise ValueError(
                f"{args.data} has images of {', '.join(map(repr, unknown[:5]))}{', ...' * (len(unknown) > 5)}, which "
                f"{args.name} does not predict: its classes are {', '.join(map(repr, names[:12]))}"
                f"{', ...' * (len(names) > 12)}; rename or move the folders"
            )
        labels = torch.tensor([names.index(name) for name in split.classes])[labels]
    elif int(labels.max()) >= len(names):
        raise ValueError(f"{args.data} has labels up to {int(labels.max())}, and {args.name} {len(names)} classes")
    return replace(split, labels=labels, classes=names)
