"""Fine-tuning of the classifier alone: features of each image once, then multinomial logistic regression."""

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.cost import machine, versions
from ..data import AnySplit
from ..data.hashes import split_digests
from ..engine.loop import run_config
from ..evaluation import Predictor
from ..models.load import weights_file

if TYPE_CHECKING:
    from .plan import Plan

_PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)  # from the strongest, so that each starts at the one before
_USUAL_PENALTY = 0.03  # without validation images
_STEPS = 200  # of L-BFGS, at most, for each penalty


@torch.no_grad()
def pooled_features(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """What the classifier of a network sees of each image, ``(n, features)`` float64 on the CPU.

    Of an `eqzoo.models.OrbitNet`, the mean over the copies of the image.

    Args:
        model: The network, in evaluation mode.
        split: The images.
        workers: The processes that read images that are not in memory.
    """
    network = cast(Any, model)
    inputs = Predictor.of(model).inputs(split, workers)
    return torch.cat(
        [network.forward_head(network.forward_features(x), pre_logits=True).cpu() for x in inputs]
    ).double()


def fit_classifier(
    features: Tensor, labels: Tensor, classes: int, penalty: float, start: Tensor | None = None, weights: Any = None
) -> Tensor:
    """Multinomial logistic regression on all images at once, by L-BFGS until it has converged.

    It minimizes ``mean CE(W z + b) + penalty / 2 · ‖W‖²``, where z are the features after standardization.

    Args:
        features: The standardized features, ``(n, features)``.
        labels: The classes, ``(n,)``.
        classes: The number of classes.
        penalty: The weight of the penalty, above 0.
        start: ``(W, b)`` to start from; None for zeros.
        weights: A factor of each class in the loss; None for 1.

    Returns:
        W and b in one matrix, ``(classes, features + 1)``.
    """
    zeros = torch.zeros(classes, features.shape[1] + 1, dtype=features.dtype)
    found = (zeros if start is None else start.clone()).requires_grad_()
    optimizer = torch.optim.LBFGS([found], max_iter=_STEPS, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.addmm(found[:, -1], features, found[:, :-1].T)
        value = F.cross_entropy(logits, labels, weights) + penalty / 2 * found[:, :-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return found.detach()


def train_classifier(plan: "Plan", facts: Mapping[str, Any]) -> nn.Module:
    """Fits the classifier of the plan's network and writes the folder of the run, as a training of one epoch does.

    The penalty is the one with the highest accuracy, then the lowest loss, on the validation images.

    Args:
        plan: The plan.
        facts: What training.json holds besides the recipe.
    """
    directory, recipe = plan.directory, plan.recipe
    splits = {key: split for key, split in plan.splits.items() if key != "test"}
    digests = split_digests(splits)
    directory.check(recipe, digests)
    torch.manual_seed(recipe.seed)
    model = plan.build().to("cuda" if plan.request.device != "cpu" and torch.cuda.is_available() else "cpu").eval()
    if not directory.has_ended():
        began = time.perf_counter()
        directory.start(recipe, digests, run_config(model, recipe, splits["train"]), facts)
        row = _fit(plan, model, splits)
        data = weights_file(model.state_dict())
        directory.save_weights(data)
        made = {"machine": machine(next(model.parameters()).device)} | versions()
        known = {"lr": 0.0, "processes": 1, "seconds": round(time.perf_counter() - began, 2), **made}
        directory.append_row(row | known | {"weights_sha256": hashlib.sha256(data).hexdigest()})
    model.load_state_dict(directory.load_weights())
    return model


def _fit(plan: "Plan", model: nn.Module, splits: Mapping[str, AnySplit]) -> dict[str, Any]:
    """Sets the classifier of a network; returns the losses, the penalty, the accuracy and, if balanced, the recall."""
    found = {key: pooled_features(model, split, plan.request.workers) for key, split in splits.items()}
    mean, scale = found["train"].mean(0), found["train"].std(0).clamp(min=1e-6)
    features = {key: (values - mean) / scale for key, values in found.items()}
    labels = {key: split.labels.cpu() for key, split in splits.items()}
    factors = torch.tensor(plan.recipe.class_weights, dtype=torch.float64) if plan.recipe.class_weights else None

    def scores(matrix: Tensor, part: str) -> dict[str, float]:
        logits = torch.addmm(matrix[:, -1], features[part], matrix[:, :-1].T)
        right = (logits.argmax(1) == labels[part]).double()
        found = {
            "valid_loss": F.cross_entropy(logits, labels[part]).item(),
            "valid_accuracy": 100 * right.mean().item(),
        }
        if factors is not None:
            counts = labels[part].bincount()
            recalls = (labels[part].bincount(right) / counts)[counts > 0]
            found["valid_recall"] = 100 * recalls.mean().item()
        return found

    matrix: Tensor | None = None
    best: tuple[tuple[float, float], dict[str, float], Tensor, float] | None = None
    for penalty in _PENALTIES if "valid" in splits else (_USUAL_PENALTY,):
        matrix = fit_classifier(features["train"], labels["train"], len(plan.names), penalty, matrix, factors)
        reached = scores(matrix, "valid" if "valid" in splits else "train")
        rank = reached.get("valid_recall", reached["valid_accuracy"]), -reached["valid_loss"]
        if best is None or rank > best[0]:
            best = rank, reached, matrix, penalty
    assert best is not None
    _, reached, matrix, penalty = best
    classifier = cast(Any, model).get_classifier()
    weight = matrix[:, :-1] / scale
    with torch.no_grad():
        classifier.weight.copy_(weight)
        classifier.bias.copy_(matrix[:, -1] - weight @ mean)
    valid = reached if "valid" in splits else {"valid_loss": None, "valid_accuracy": None}
    return {"epoch": 1, "loss": scores(matrix, "train")["valid_loss"], "penalty": penalty, **valid}
