"""`eqzoo info`: group, size, cost, paper, checkpoints and layers of a network."""

import argparse
import itertools
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..analysis.cost import multiply_adds
from ..analysis.sizes import weightless
from ..cards.checkpoint import error_text
from ..data.hashes import SPLIT_NAMES
from ..groups import Group
from ..hub import WEIGHTS_NAME
from ..models import EquivariantNet, OrbitNet
from ..models.load import ModelSource, load_network, resolve
from ..models.papers import PAPERS, paper_of, rows
from ..models.sizes import refusal
from ._answer import Answer, table
from ._networks import count_parameters, registered_tags, results_beside, weights_and_results

_SPANS = (8, 16, 32)  # how far from the network's own side others are tried, in pixels


def run(args: argparse.Namespace) -> Answer:
    """Describes a network; for a checkpoint, with its results."""
    source = resolve(args.name)
    model = weightless(source)
    name = source.architecture
    tag = "" if source.config else args.name.partition(".")[2]
    paper = paper_of(name)
    data: dict[str, Any] = {
        "name": args.name,
        "summary": _summary(name),
        "group": model.group.name,
        "elements": model.group.order,
        "exact_for": [model.group.describe(g) for g in model.group.grid_elements],
        "parameters": count_parameters(model),
        "multiply_adds": multiply_adds(load_network(args.name, pretrained=False).network, model.input_size),
        "input_size": [*model.input_size],
        "sides": _sides(model),
        "num_classes": model.num_classes,
        "paper": {"authors": paper.short, "title": paper.title, "url": paper.url} if paper else None,
        "checkpoints": [_own(model, source)] if source.config else [
            _checkpoint(f"{name}.{other}", cfg.hf_hub_id) for other, cfg in registered_tags(name).items()
            if not tag or other == tag
        ],
        "layers": _layers(model, args.layers),
    }  # fmt: skip
    return Answer(_text(data, model.group), data)


def _summary(name: str) -> str:
    text = timm.model_entrypoint(name).__doc__ or "no description"
    return text.strip().splitlines()[0].partition(" (")[0].rstrip(".")


def _sides(model: EquivariantNet | OrbitNet) -> dict[str, Any]:
    """The sides near the network's own of the square images that it accepts, because it is equivariant on them."""
    own = model.input_size[1]
    for span in _SPANS:
        tried = range(max(1, own - span), own + span + 1)
        taken = [side for side in tried if refusal(model, side, side) is None]
        if len(taken) > 2:
            break
    return {"tried": [tried[0], tried[-1]], "exact": taken}


def _checkpoint(name: str, repo_id: str | None) -> dict[str, Any]:
    """Where the weights of a checkpoint are, and its results."""
    paper, printed = None, rows().get(name)
    if printed:
        paper = {key: getattr(printed, key) for key in ("parameters", "error", "spread")}
        paper["authors"] = PAPERS[printed.paper].short
    path, results = weights_and_results(name)
    where = str(path) if path else f"https://huggingface.co/{repo_id}" if repo_id else None
    classes = [row["name"] for row in (results or {}).get("classes", ())]
    return {"name": name, "where": where, "results": results, "paper": paper, "classes": classes}


def _own(model: EquivariantNet | OrbitNet, source: ModelSource) -> dict[str, Any]:
    """A checkpoint that is named by its folder, file or repo: its classes, and the results beside it.

    Its name is that of the results, or else that which it was called by, because the tag in config.json may be that of
    the checkpoint from which the network was fine-tuned.
    """
    weights = (source.weights or source.folder / WEIGHTS_NAME) if source.folder else None
    results = results_beside(weights) if weights and weights.name == WEIGHTS_NAME else None
    classes = source.config.get("label_names") or model.pretrained_cfg.get("label_names") or ()
    return {
        "name": (results or {}).get("checkpoint", source.name),
        "where": str(weights or source.name),
        "results": results,
        "paper": None,
        "classes": list(classes),
    }


@torch.no_grad()
def _layers(model: EquivariantNet | OrbitNet, every: bool) -> list[dict[str, Any]]:
    """The stem, the blocks and the head, or every layer with parameters or a group.

    The output of layers that are never called, because another one reads their parameters, is None.
    """
    rows, handles = list[dict[str, Any]](), []
    for name, module in model.named_modules():
        if _is_layer(name, module) if every else _is_stage(name, model):
            kind, count = type(module).__name__, count_parameters(module)
            rows.append({"name": name, "type": kind, "output": None, "parameters": count})
            handles.append(module.register_forward_hook(partial(_note_output, rows[-1])))
    refusal(model, *model.input_size[1:])
    for handle in handles:
        handle.remove()
    return rows


def _note_output(row: dict[str, Any], _module: nn.Module, _inputs: object, output: object) -> None:
    if isinstance(output, Tensor):
        row["output"] = list(output.shape[1:])


def _is_stage(name: str, model: EquivariantNet | OrbitNet) -> bool:
    network, prefix = (model.network, "network.") if isinstance(model, OrbitNet) else (model, "")
    blocks = [f"{prefix}blocks.{i}" for i in range(len(getattr(network, "blocks", ())))]
    children = [f"{prefix}{child}" for child, _ in network.named_children() if child != "blocks"]
    return name in blocks or name in children


def _is_layer(name: str, module: nn.Module) -> bool:
    return bool(name) and (isinstance(getattr(module, "group", None), Group) or bool(module._parameters))


def _text(data: dict[str, Any], group: Group) -> str:
    between = "" if group.on_grid else "; approximate for its other rotations"
    facts = [
        ["network", data["name"]],
        ["", data["summary"]],
        ["group", f"{data['group']}, {data['elements']} element" + "s" * (data["elements"] > 1)],
        ["exact for", ("translations alone" if group.order == 1 else "; ".join(data["exact_for"][1:])) + between],
        ["parameters", f"{data['parameters']:,}"],
        ["multiply-adds an image", f"{data['multiply_adds']:,}"],
        ["input", " x ".join(map(str, data["input_size"])) + f", {data['num_classes']} classes"],
        ["sides", _sides_text(data["sides"])],
    ]
    if data["paper"]:
        facts.append(["paper", f"{data['paper']['title']} ({data['paper']['authors']}) {data['paper']['url']}"])
    parts = [table(facts, flexible=1)]
    parts += [table(_checkpoint_rows(entry), flexible=1) for entry in data["checkpoints"]]
    heading = ["layer", "type", "output", "parameters"]
    rows = [
        [row["name"], row["type"], " x ".join(map(str, row["output"] or [])), f"{row['parameters']:,}"]
        for row in data["layers"]
    ]
    parts.append(table([heading, *rows], right={3}))
    return "\n\n".join(parts)


def _sides_text(sides: dict[str, Any]) -> str:
    low, high = sides["tried"]
    exact = sides["exact"]
    if len(exact) == high - low + 1:
        return f"all of {low} to {high}"
    steps = {b - a for a, b in itertools.pairwise(exact)}
    step = f"every {steps.pop()} pixels; " if len(steps) == 1 and steps != {1} else ""
    return ", ".join(map(str, exact)) + f" ({step}{low} to {high} were tried)"


def _checkpoint_rows(entry: dict[str, Any]) -> list[list[str]]:
    rows = [["checkpoint", entry["name"]], ["weights", entry["where"] or "none yet"]]
    if entry.get("classes"):
        rows.append(["classes", ", ".join(entry["classes"])])
    results = entry["results"] or {}
    if "accuracy" in results:
        split = results["evaluated_on"]
        of = f", of {results['images'][split]:,} images"
        rows.append([f"{SPLIT_NAMES[split]} error", error_text(results, 2) + of])
    if "same_class_at_all_quarter_rotations" in results:
        share = f"{results['same_class_at_all_quarter_rotations']:.2f} %, of {results['rotated_images']:,} images"
        rows.append(["same class at all 90° rotations", share])
    if "equivariance_error" in results:
        rows.append(["equivariance error", f"{results['equivariance_error']:.0e}"])
    if "command" in results:
        rows.append(["made by", results["command"]])
    if entry["paper"]:
        paper = entry["paper"]
        spread = f" ± {paper['spread']}" if paper["spread"] else ""
        said = [f"{paper['error']}{spread} % test error"] * bool(paper["error"])
        said += [f"{paper['parameters']} parameters"] * bool(paper["parameters"])
        rows.append(["paper", f"{', '.join(said) or 'no number'} ({paper['authors']})"])
    return rows
