"""Renders a model card and the table of results; every number comes from results.json or the papers' table."""

import json
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from .._common import setting_text
from ..data import DataSet, dataset
from ..data.hashes import SPLIT_NAMES
from ..data.images import MODES
from ..engine.recipe import RUN_PREFIX
from ..groups import Group
from ..models.load import own_module
from ..models.papers import PAPERS, Paper, Row, paper_of, rows

__all__ = ["counts_of", "distilled", "error_text", "full_size_accuracies", "mean_error", "render_card", "wrapped"]

EXACT = 1e-9  # the largest equivariance error, in float64, of an exactly equivariant network
_STEPS = {1: 360, 2: 180, 4: 90}  # degrees between the rotations of the pixel grid, by their number
_UNEQUAL = 2  # times the images of the smallest class that the largest one has, where a card shows the classes


def render_card(
    r: dict[str, Any],
    config: dict[str, Any],
    size: int,
    repo_id: str | None,
    folder: str,
    ours: bool,
    recipe_text: str = "",
) -> str:
    """The README.md of a checkpoint's Hub repo.

    Args:
        r: Its results.json.
        config: Its config.json.
        size: The size of its weights file, in bytes.
        repo_id: Its Hub repo, ``<owner>/<name>``, or None if it has none.
        folder: A folder that holds it, as a reader would write it.
        ours: Whether it is a checkpoint of the zoo, which goes by its bare name.
        recipe_text: What is said about its recipe, in whole sentences; may be empty.
    """
    data, row, paper = dataset(r["dataset"]["name"]), rows().get(r["checkpoint"]), _paper(config["architecture"])
    sections = [
        f"---\n{_front_matter(r, config, data)}\n---",
        f"# {r['checkpoint']}",
        _opening(r, config, data, paper, "started from earlier weights" in recipe_text),
        _use(r["checkpoint"], config, data, repo_id, folder, ours),
        f"## Results\n\n{_results(r, data, row, size, ours)}",
        f"## Training\n\n{_training(r, recipe_text)}",
        f"## Limits and intended use\n\n{wrapped(f'{data.use} {_rotations(r)}')}",
        f"## Citation\n\n{_citation(paper)}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(r: dict[str, Any], config: dict[str, Any], data: DataSet) -> str:
    name = r["dataset"]["name"]
    front = ModelCardData(
        license=config["pretrained_cfg"].get("license"),
        library_name="eqzoo",
        pipeline_tag="image-classification",
        tags=["image-classification", "equivariance", r["group"], "timm"],
        datasets=[data.hub_id] if data.hub_id else None,
        metrics=["accuracy"],
        base_model=r.get("base_model"),
        model_name=r["checkpoint"],
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=data.hub_id if data.hub_id and data.same_as_hub else name,
                dataset_name=data.title,
                dataset_split="test",
                metric_type="accuracy",
                metric_value=round(100 - r["test_error"], 3),
            )
        ],
    )
    return str(front.to_yaml())


def _opening(r: dict[str, Any], config: dict[str, Any], data: DataSet, paper: Paper | None, earlier: bool) -> str:
    there = any(name.partition(".")[0] == config["architecture"] for name in rows())
    of = f" {'of' if there else 'after'} {paper.short}, [{paper.title}]({paper.url})," if paper else ""
    base = r.get("base_model")
    which = " earlier weights of" * earlier
    tuned = f" It was fine-tuned from{which} [{base}](https://huggingface.co/{base})." if base else ""
    return wrapped(
        f"`{config['architecture']}`{of} trained on {data.text.format(**counts_of(r))}.{_of_sources(r)}{tuned} "
        f"{_promise(r)}"
    )


def _of_sources(r: dict[str, Any]) -> str:
    """A sentence on the sources, such as patients, if the images were split by these."""
    counts = {split: count for split in SPLIT_NAMES if (count := r.get("sources", {}).get(split))}
    if len(counts) < 2:
        return ""
    splits, numbers = _listed([SPLIT_NAMES[split] for split in counts]), _listed([f"{n:,}" for n in counts.values()])
    unknown = [name for split, name in SPLIT_NAMES.items() if split not in counts and r["dataset"].get(split)]
    others = f"; the sources of the {_listed(unknown)} images are not known" if unknown else ""
    return f" The {splits} images share no source, such as a patient or a slide: they are of {numbers}{others}."


def _listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _promise(r: dict[str, Any]) -> str:
    group = r["group"]
    if group == "z2":
        return "It is the baseline: equivariant to translations alone, not to rotations."
    if r["equivariance_error"] > EXACT:
        return f"It is approximately equivariant under {group}: the table of results has the error."
    if not (elements := _elements(group)):
        return f"It is approximately equivariant under {group}: no rotation of it maps the pixel grid onto itself."
    between = "" if Group.from_name(group).on_grid else ", and approximately to the rotations between them"
    return f"It is exactly equivariant to {elements} by construction (group {group}){between}."


def _elements(group: str) -> str:
    """The elements of a group on the pixel grid, in words."""
    named = Group.from_name(group)
    degrees = _STEPS[named.of_grid.rotations]
    return " and ".join([f"{degrees}° rotations"] * (degrees < 360) + ["reflections"] * named.reflections)


def _rotations(r: dict[str, Any]) -> str:
    if r["group"] == "z2":
        return "It is equivariant to no rotation or reflection: its accuracy on rotated images depends on its training."
    if r["group"] == "z2m":
        return "It is exact for reflections; its accuracy on rotated images depends on its training."
    curve = " The curve over the angle shows its accuracy there." if "rotation_curve" in r else ""
    if r["equivariance_error"] > EXACT or not _elements(r["group"]):
        return f"It is approximate: its accuracy on rotated images depends on its training.{curve}"
    degrees = _STEPS[Group.from_name(r["group"]).of_grid.rotations]
    return (
        f"It is exact for {_elements(r['group'])} of the pixel grid; at angles between multiples of {degrees}° its "
        f"accuracy depends on its training.{curve}"
    )


def _use(name: str, config: dict[str, Any], data: DataSet, repo_id: str | None, folder: str, ours: bool) -> str:
    cfg = config["pretrained_cfg"]
    hub, local = f"hf-hub:{repo_id}", f"local-dir:{folder}"
    best = name if ours else hub if repo_id else local
    doors = [(hub, "from the Hub")] * bool(repo_id) + [(local, "from a folder that holds this repo")]
    timm_lines = "\n".join(
        f"# {note}\nmodel = timm.create_model({_quoted(door)}, pretrained=True).eval()" for door, note in doors
    )
    channels, height, width = cfg["input_size"]
    labels = config["label_names"]
    mean, std = (", ".join(f"{value:g}" for value in cfg[key]) for key in ("mean", "std"))
    of = f"; {data.images}" if data.images else ""
    classes = f"The {config['num_classes']} classes: {', '.join(labels)}." if labels else ""
    timm = (
        " On square images timm's create_transform gives the same invariance; on others it rounds the crop to whole "
        "pixels, so that a rotated image gets slightly other ones."
    )
    images = wrapped(
        f"Images are {channels} x {height} x {width} (channels, height, width){of}. Their values, 0 to 255, are "
        f"divided by 255 and normalized by mean {mean} and standard deviation {std}, both by eqzoo.data.normalize."
        f"{timm if channels in MODES else ''} {classes}"
    )
    file = "image.png" if channels in MODES else "images.npz"
    own = own_module(config["architecture"])
    variable, line = (f"EQZOO_NETWORKS={own} ", f"import {own}  # defines the network\n") if own else ("", "")
    shell = f"From a shell:\n\n    {variable}eqzoo predict {file} --model {shlex.quote(best)}\n\n"
    hub_lines = f"""With torch.hub, which needs the dependencies of eqzoo but not eqzoo itself:

```python
import torch

model = torch.hub.load("eqzoo/eqzoo", "create_model", {_quoted(best)}, pretrained=True, trust_repo=True).eval()
```

"""
    with_own = f", and the module {own}, which defines the network and is not part of eqzoo" if own else ""
    return f"""## Use

With [eqzoo](https://github.com/eqzoo/eqzoo) installed{with_own}:

```python
{line}{_read(best, channels, height, width)}
probabilities = model(x).softmax(1)[0]
print(probabilities.topk({min(3, config["num_classes"])}), model.pretrained_cfg.get("label_names"))
```

With timm, once eqzoo is imported:

```python
{line}import eqzoo
import timm

{timm_lines}
```

{"" if own else hub_lines}{shell}{images}"""


def _quoted(text: str) -> str:
    """A string in Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _read(best: str, channels: int, height: int, width: int) -> str:
    """The code that makes the network and the images that it takes, ``x``."""
    if channels in MODES:
        return f"""import eqzoo
from eqzoo import data

model = eqzoo.create_model({_quoted(best)}, pretrained=True).eval()
mean, std = (model.pretrained_cfg[key] for key in ("mean", "std"))
image = data.preprocess(data.load_image("image.png", channels={channels}), model.input_size[1:])
x = data.normalize(image.unsqueeze(0), mean, std, image.dtype)"""
    return f"""import eqzoo
import torch
from eqzoo.data import normalize

model = eqzoo.create_model({_quoted(best)}, pretrained=True).eval()
images = torch.randint(0, 256, (1, {channels}, {height}, {width}))  # in place of yours, values of 0 to 255
x = normalize(images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"], torch.float32)"""


def _results(r: dict[str, Any], data: DataSet, row: Row | None, size: int, ours: bool) -> str:
    row = row if row and row.error_text else None  # the paper prints no number of some networks
    printed = f"{row.error_text} %" if row else ""
    several = _has_spread(r)
    seed = f", seed {r['recipe']['seed']}" if "seed" in r["recipe"] else ""
    rows = [
        (
            f"test error, {r['dataset']['test']:,} {data.noun}{seed}",
            f"{r['test_error']:.3f} %{distilled(r)}",
            "" if several else printed,
        )
    ]
    if several:
        errors = ", ".join(f"{error:.2f}" for error in r["test_errors"])
        rows.append((f"mean ± standard deviation of {r['seeds']} seeds ({errors})", error_text(r, 3), printed))
    if (macro := r.get("macro_f1")) is not None:
        rows.append((f"macro F1, the mean over classes, {r['dataset']['test']:,} {data.noun}", f"{macro:.3f} %", ""))
    validated = bool(r["dataset"].get("valid"))
    if validated:
        trained = len(r.get("valid_accuracies", [])) or r["recipe"]["epochs"]  # patience may have ended it early
        best = f"{r['valid_error']:.3f} %, epoch {r['selected_epoch']} of {trained}"
        best += " of this run, which went on with the weights of another" if _goes_on(r) else ""
        rows.append((f"validation error, {r['dataset']['valid']:,} {data.noun}", best, ""))
    count = r.get("rotated_images", r["dataset"]["test"])
    curve = r.get("rotation_curve")
    # Results of before the sample was drawn do not say so: they are of the first images.
    drawn = (curve or {}).get("sample")
    which = f"{count:,} {data.noun} {drawn}" if drawn else f"the first {count:,} {data.noun}"
    of = f", {which}" if count < r["dataset"]["test"] else ""
    if rotated := r.get("test_error_of_rotated_copies"):
        values = ", ".join(f"{error:.2f} %" for error in rotated)
        rows.append((f"test error on images rotated by 0°, 90°, 180°, 270°{of}", values, ""))
    rows.append(
        (
            f"{data.noun} with the same predicted class at all four{of}",
            f"{r['same_class_at_all_quarter_rotations']:.3f} %",
            "",
        )
    )
    if curve:
        low, high = min(curve["accuracy"]), max(curve["accuracy"])
        which = f"{curve['images']:,} {data.noun} {drawn}" if drawn else f"the first {curve['images']:,} {data.noun}"
        what = f"accuracy at {len(curve['angles'])} angles, lowest and highest, {which}"
        rows.append((what, f"{low:.2f} %, {high:.2f} %", ""))
    call = 'model, group="p4"'
    if len(Group.from_name(r["group"]).grid_elements) > 1:  # more than the identity
        call = "model"
        rows.append((f"equivariance error, {r['group']}", f"{r['equivariance_error']:.1e}", ""))
    if r["group"] != "p4":
        rows.append(("equivariance error, p4", f"{r['equivariance_error_p4']:.1e}", ""))
    rows.append(("parameters", f"{r['parameters']:,}", ""))
    rows.append(("weights", f"{_bytes(size)}, {r.get('weights_dtype', 'float32')}", ""))
    if count := r.get("multiply_adds"):
        rows.append(("multiply-adds an image", f"{count:,}", ""))
    if speed := r.get("throughput"):
        value = f"{speed['images_per_second']:,.0f} a second, float32, contiguous, batch {speed['batch_size']}, "
        value += f"{speed['machine']}; `eqzoo bench` compares networks"
        rows.append((f"throughput, {data.noun}", value, ""))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [("", "here", "paper"), ("---",) * 3, *rows])
    note = f"The paper's number: {row.note}. " if row else ""
    if r.get("distilled"):
        other = ", which no network of the paper did, so the two errors do not compare like with like" if row else ""
        note += f"Distilled: the network also learned from the predictions of other networks{other}. "
    image = f"\n\n![Accuracy of {r['checkpoint']} over the angle of rotation](rotation_curve.svg)" if curve else ""
    half = (
        " The parameters were rounded to half precision before the evaluation; the numbers are of the rounded ones."
        if r.get("weights_dtype", "float32") != "float32"
        else ""
    )
    parts = ", and of earlier parts of this one where the text below has such errors" * ours
    chosen = (
        f"The epoch was chosen on the validation {data.noun}. The test {data.noun} chose nothing: they were read at "
        f"the end of {'each recipe that was tried' if ours else 'the training'}{parts}."
        if validated
        else f"No {data.noun} were held out for validation: the weights are those of the last epoch."
    )
    definition = (
        "The equivariance error is the relative error `‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖`, the largest of layers, features "
        "and logits and of the elements of the group that map the pixel grid to itself, in float64; "
        f"`eqzoo.equivariance_error({call})` measures it."
    )
    return f"{table}\n\n{wrapped(f'{note}{chosen}{half} {definition}')}{image}{_classes(r, data)}"


def _classes(r: dict[str, Any], data: DataSet) -> str:
    """The table of the classes, where the largest has at least twice the test images of the smallest."""
    classes = r.get("classes") or [{"images": 1}]
    counts = [row["images"] for row in classes]
    if max(counts) < _UNEQUAL * min(counts):
        return ""
    lines = [f"| class | test {data.noun} | recall | F1 |", "|---|---|---|---|"]
    for row in classes:
        percents = ["" if row[key] is None else f"{row[key]:.2f} %" for key in ("recall", "f1")]
        cells = [_value(row["name"]), f"{row['images']:,}", *percents]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n\n" + "\n".join(lines)


def _training(r: dict[str, Any], recipe_text: str) -> str:
    recipe = r["recipe"]
    known = {name: value for name, value in recipe.items() if value not in (None, "", {}, [], ())}
    taught = {"teachers", "soft_labels"} & known.keys()
    known = known if taught else {name: known[name] for name in known if name != "teacher_weight"}
    table = "\n".join(f"| {name} | {_value(value)} |" for name, value in known.items())
    hours = r["training_seconds"] / 3600
    time = f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
    time = (
        time if hours >= 1 / 30 else f"{3600 * hours:.0f} seconds" if 3600 * hours >= 1.5 else "less than two seconds"
    )
    versions = ", ".join(f"{'Python' if name == 'python' else name} {value}" for name, value in r["versions"].items())
    said = f"{recipe_text} " if recipe_text else ""
    took = "The epochs of this run took" if _goes_on(r) else "Trained in"
    drawn = full_size_accuracies(r)
    curve = f"\n\n![Accuracy of {r['checkpoint']} over the epochs](training_curve.svg)" if drawn else ""
    return f"""{wrapped(f"{said}{took} {time} on {r['machine']}; {versions}.")}

    {r["command"]}{curve}

| setting | value |
|---|---|
{table}

Weights: sha256 `{r["weights_sha256"]}`."""


def _citation(paper: Paper | None) -> str:
    if paper is None:
        return "eqzoo: https://github.com/eqzoo/eqzoo, file CITATION.cff."
    return f"""```bibtex
{paper.bibtex}
```

The implementation and these weights: eqzoo, https://github.com/eqzoo/eqzoo, file CITATION.cff."""


def _paper(architecture: str) -> Paper | None:
    """The paper of a network: of its rows in the papers' tables, whatever the data set, or of its family."""
    keys = [row.paper for name, row in rows().items() if name.partition(".")[0] == architecture]
    return PAPERS[keys[0]] if keys else paper_of(architecture)


def counts_of(r: dict[str, Any]) -> dict[str, str]:
    """The numbers of training, validation and test images, as they are printed."""
    counts = {split: r["dataset"].get(split) for split in ("train", "valid", "test")}
    return {split: f"{count:,}" if count else "no" for split, count in counts.items()}


def error_text(r: dict[str, Any], digits: int) -> str:
    """The test error, with the spread over seeds where there are several."""
    spread = f" ± {r['test_error_std']:.{digits}f}" if _has_spread(r) else ""
    return f"{mean_error(r):.{digits}f}{spread} %"


def mean_error(r: dict[str, Any]) -> float:
    """The test error in percent, the mean over seeds where there are several."""
    return sum(r["test_errors"]) / len(r["test_errors"]) if _has_spread(r) else float(r["test_error"])


def _has_spread(r: dict[str, Any]) -> bool:
    return r["seeds"] > 1 and r.get("test_error_std") is not None


def full_size_accuracies(r: dict[str, Any]) -> list[float]:
    """The validation accuracies of the epochs at full size, in percent; [] if less than two are known."""
    found: list[float] = r.get("valid_accuracies", [])[r["recipe"].get("half_size_epochs", 0) :]
    return found if len(found) > 1 else []


def distilled(r: dict[str, Any]) -> str:
    """A mark behind the error of a network that learned from others too, in its run or in one that it goes on with.

    What a checkpoint learned from that a run starts from by its name does not count: the card names that checkpoint.
    """
    return " (distilled)" if r.get("distilled") else ""


def _goes_on(r: dict[str, Any]) -> bool:
    """Whether the weights are those of a run that started from another one's."""
    return str(r["recipe"].get("start")).startswith(RUN_PREFIX)


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _value(value: Any) -> str:
    return setting_text(value).replace("|", "\\|")
