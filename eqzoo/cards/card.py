"""The card of a checkpoint, README.md: every number comes from its results.json, config.json and training.json."""

import json
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from .._common import setting_text
from ..data.catalog import DataSet
from ..data.class_folders import ClassFolders
from ..data.images import MODES
from ..evaluation.metrics import averaged_classes
from ..groups import Group
from ..models.load import is_own, own_module
from ..models.papers import PAPERS, Paper, Row, paper_of, rows
from .checkpoint import Checkpoint, counts_of, error_text, has_spread, marks

EXACT = 1e-9  # the largest equivariance error, in float64, of an exactly equivariant network
_LIMITS = "At angles that are not in its group its accuracy depends on its training; the curve over the angle shows it."
_UNEQUAL = 2  # times the images of the smallest class that the largest one has, where a card shows the classes
_MATRIX_CLASSES = 20  # in the largest confusion matrix that is printed as a table
_CONFUSED_PAIRS = 20  # of classes that are listed instead
_OF_FITTED = {"model", "dataset", "seed", "model_args", "class_weights"}  # settings of a fitted classifier


def render_card(checkpoint: Checkpoint, repo_id: str | None = None) -> str:
    """The README.md of a checkpoint's folder.

    Args:
        checkpoint: The checkpoint.
        repo_id: Its Hub repo, ``<owner>/<name>``, or None if it has none.
    """
    sections = [
        f"---\n{_front_matter(checkpoint)}\n---",
        f"# {checkpoint.name}",
        _opening(checkpoint),
        _use(checkpoint, repo_id),
        f"## Results\n\n{_results(checkpoint)}",
        f"## Training\n\n{_training(checkpoint)}",
        f"## Limits and intended use\n\n{wrapped(f'{checkpoint.data.use} {_LIMITS}{_terms(checkpoint.data)}')}",
        f"## Citation\n\n{_citation(_paper(checkpoint.config['architecture']))}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(checkpoint: Checkpoint) -> str:
    r, data = checkpoint.results, checkpoint.data
    tested = EvalResult(
        task_type="image-classification",
        dataset_type=data.hub_id if data.hub_id and data.same_as_hub else r["data"],
        dataset_name=data.title,
        dataset_split=data.test_split,
        metric_type="accuracy",
        metric_value=round(r["accuracy"], 3),
    )
    front = ModelCardData(
        license=checkpoint.config["pretrained_cfg"].get("license"),
        library_name="eqzoo",
        pipeline_tag="image-classification",
        tags=["image-classification", "equivariance", r["group"], "timm"],
        datasets=[data.hub_id] if data.hub_id else None,
        metrics=["accuracy"],
        base_model=r.get("base_model"),
        model_name=checkpoint.name,
        eval_results=[tested] if r["evaluated_on"] == "test" else None,
    )
    return str(front.to_yaml())


def _opening(checkpoint: Checkpoint) -> str:
    r, architecture = checkpoint.results, checkpoint.config["architecture"]
    paper, printed = _paper(architecture), any(name.partition(".")[0] == architecture for name in rows())
    of = f" {'of' if printed else 'after'} {paper.short}, [{paper.title}]({paper.url})," if paper else ""
    base = r.get("base_model")
    made = "fine-tuned from" if checkpoint.is_trained else "converted, without training, from"
    tuned = f" It was {made} [{base}](https://huggingface.co/{base})." if base else ""
    text = checkpoint.data.text.format(**counts_of(r))
    inside = checkpoint.config.get("model_args", {}).get("network") if architecture == "orbitnet" else None
    named = f"`{architecture}`{of}"
    if inside:
        named = f"`{inside}`{' of timm' * (not is_own(inside.partition('.')[0]))}"
        named += " as an `orbitnet`" * (r["group"] != "z2")
    return wrapped(f"{named} trained on {text}.{tuned} {_promise(r)}")


def _promise(r: Mapping[str, Any]) -> str:
    group = Group.from_name(r["group"])
    if group.name == "z2":
        return "It is a plain network: equivariant to neither rotations nor reflections."
    if r["equivariance_error"] > EXACT:
        return f"It is approximately equivariant under {group.name}: the table of results has the error."
    degrees = 360 // group.of_grid.rotations
    elements = [f"{degrees}° rotations"] * (degrees < 360) + ["reflections"] * group.reflections
    if not elements:
        return f"It is approximately equivariant under {group.name}: no rotation of it maps the pixel grid onto itself."
    between = "" if group.on_grid else ", and approximately to the rotations between them"
    return f"It is exactly equivariant to {' and '.join(elements)} by construction (group {group.name}){between}."


def _use(checkpoint: Checkpoint, repo_id: str | None) -> str:
    name, config, data = checkpoint.name, checkpoint.config, checkpoint.data
    folder = f"model_cards/{name}" if checkpoint.zoo else repo_id.rpartition("/")[2] if repo_id else "."
    cfg = config["pretrained_cfg"]
    hub, local = f"hf-hub:{repo_id}", f"local-dir:{folder}"
    best = name if checkpoint.zoo else hub if repo_id else local
    here = not (checkpoint.zoo or repo_id)
    doors = [(hub, "from the Hub")] * bool(repo_id)
    doors += [(local, "from this folder" if here else "from a folder that holds this repo")]
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

With [eqzoo](https://github.com/eqzoo/eqzoo) installed{with_own}{", in the folder of this card" if here else ""}:

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

{_pipeline(line, repo_id or folder) if channels == 3 and labels else ""}{"" if own else hub_lines}{shell}{images}"""


def _pipeline(line: str, place: str) -> str:
    """The use in Hugging Face transformers, whose pipelines read images of three channels."""
    return f"""With Hugging Face transformers:

```python
{line}import eqzoo  # registers the network with timm
from transformers import pipeline

print(pipeline("image-classification", {_quoted(place)})("image.png"))
```

"""


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


def _results(checkpoint: Checkpoint) -> str:
    r, row = checkpoint.results, rows().get(checkpoint.name)
    # A user may give a checkpoint any name, and the paper prints no number of some networks.
    same = checkpoint.name.removesuffix("_aug") == f"{checkpoint.config['architecture']}.{r['data']}"
    row = row if row and same and row.error_text else None
    table = [("", "here", "paper"), ("---",) * 3, *_accuracy_rows(checkpoint, row), *_rotation_rows(checkpoint)]
    table += _network_rows(checkpoint)
    columns = 2 if row is None else 3
    parts = ["\n".join(f"| {' | '.join(cells[:columns])} |" for cells in table), wrapped(_explanation(checkpoint, row))]
    parts += [f"![{Path(name).stem.replace('_', ' ')} of {checkpoint.name}]({name})" for name in checkpoint.figures]
    parts += _classes(checkpoint)
    lines = [*(f"- {note}" for note in r.get("notes", ())), *(f"- Advice: {line}." for line in r.get("advice", ()))]
    return "\n\n".join([*parts, *["\n".join(lines)] * bool(lines)])


def _accuracy_rows(checkpoint: Checkpoint, row: Row | None) -> list[tuple[str, str, str]]:
    r, printed = checkpoint.results, f"{row.error_text} %" if row else ""
    of, several = f"{r['images'][r['evaluated_on']]:,} {checkpoint.evaluated}", has_spread(r)
    low, high = r["accuracy_interval"]
    seed = checkpoint.training["recipe"].get("seed")
    found = [
        (f"accuracy, {of}, seed {seed}", f"{r['accuracy']:.2f} %", ""),
        ("95 % confidence interval of it, as if each image stood alone", f"{low:.1f} to {high:.1f} %", ""),
        ("error", f"{100 - r['accuracy']:.2f} %{marks(r)}", "" if several else printed),
    ]
    if several:
        errors = ", ".join(f"{100 - accuracy:.2f}" for accuracy in r["accuracies"])
        title = f"error, mean ± standard deviation of {len(r['accuracies'])} seeds ({errors})"
        found.append((title, error_text(r, 2), printed))
    which = averaged_classes(r["classes"])
    for key, title in (
        ("balanced_accuracy", f"mean recall of {which}"),
        ("macro_f1", f"mean F1 of {which}"),
        ("macro_auc", f"mean area under the ROC curve of {which}, each against the others"),
    ):
        if r.get(key) is not None:
            found.append((title, f"{r[key]:.2f} %", ""))
    if (valid := r.get("valid_accuracy")) is not None and "valid" in r["images"]:
        which = f", penalty {r['penalty']:g}" if "penalty" in r else f", epoch {r['selected_epoch']} of {r['epochs']}"
        kept = f"{valid:.2f} %{which if checkpoint.is_trained else ''}"
        found.append((f"validation accuracy, {r['images']['valid']:,} {checkpoint.data.noun}", kept, ""))
    return found


def _rotation_rows(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    r, noun = checkpoint.results, checkpoint.data.noun
    curve, count = r["rotation_curve"], r["rotated_images"]
    copies = ", ".join(f"{accuracy:.2f} %" for accuracy in r["accuracy_of_rotated_copies"])
    angles = f"lowest and highest accuracy at {len(curve['angles'])} angles, {curve['images']:,} {noun}"
    return [
        (f"accuracy rotated by 0°, 90°, 180°, 270°, {count:,} {noun}", copies, ""),
        ("the same class at all four", f"{r['same_class_at_all_quarter_rotations']:.2f} %", ""),
        (angles, f"{min(curve['accuracy']):.2f} %, {max(curve['accuracy']):.2f} %", ""),
    ]


def _network_rows(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    r, speed = checkpoint.results, checkpoint.results.get("throughput")
    size = f"{checkpoint.size / 1e6:.1f} MB" if checkpoint.size >= 1e6 else f"{checkpoint.size / 1e3:.0f} kB"
    found = []
    if len(Group.from_name(r["group"]).grid_elements) > 1:  # more than the identity
        found.append((f"equivariance error, {r['group']}", f"{r['equivariance_error']:.1e}", ""))
    if Group.from_name(r["group"]).rotations % 4:  # else it is among those of the group
        found.append(("equivariance error, p4", f"{r['equivariance_error_p4']:.1e}", ""))
    found += [
        ("parameters", f"{r['parameters']:,}", ""),
        ("weights", f"{size}, {r['weights_dtype']}", ""),
        ("multiply-adds an image", f"{r['multiply_adds']:,}", ""),
    ]
    if speed:  # of a fine-tuned network, on its user's machine
        rate = f"{speed['images_per_second']:,.0f} a second, float32, batch {speed['batch_size']}, {speed['machine']}"
        found.append(("predictions", rate, ""))
    return found


def _explanation(checkpoint: Checkpoint, row: Row | None) -> str:
    """What the numbers mean, and what was chosen on which images."""
    r, noun = checkpoint.results, checkpoint.data.noun
    note = f"The paper's number: {row.note}. " if row else ""
    if r.get("distilled"):
        other = ", which no network of the paper did, so the two errors do not compare like with like" if row else ""
        taught = any(checkpoint.training["recipe"].get(key) for key in ("teachers", "soft_labels"))
        who = "the network" if taught else "its start"
        note += f"Distilled: {who} also learned from the predictions of other networks{other}. "
    if r["weights_dtype"] != "float32":
        note += "The parameters were rounded to half precision before the evaluation. "
    last = "the weights are those of the last epoch"
    if "penalty" in r:
        last = "the penalty of the classifier, which alone was fitted, is the usual one"
    chosen = f"No {noun} were held out for validation: {last}."
    if r["images"].get("valid"):
        what = "The penalty of the classifier, which alone was fitted," if "penalty" in r else "The epoch"
        chosen = f"{what} was chosen on the validation {noun}"
        chosen += f"; the test {noun} chose nothing." if r["evaluated_on"] == "test" else ", which are those evaluated."
    if not checkpoint.is_trained:
        chosen = f"The validation and the test {noun} chose nothing."
    call = "model" if len(Group.from_name(r["group"]).grid_elements) > 1 else 'model, group="p4"'
    return (
        f"{note}{chosen} The equivariance error is `‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖`, the largest of layers, features and "
        "logits and of the elements of the group that map the pixel grid to itself, in float64; "
        f"`eqzoo.equivariance_error({call})` measures it."
    )


def _classes(checkpoint: Checkpoint) -> list[str]:
    """The table of the classes and the confusion matrix, where classes are unequal or the network is the user's."""
    r, rows = checkpoint.results, checkpoint.results["classes"]
    counts = [row["images"] for row in rows]
    if checkpoint.zoo and max(counts) < _UNEQUAL * min(counts):
        return []
    lines = [f"| class | {checkpoint.evaluated} | precision | recall | F1 |", "|---|---|---|---|---|"]
    for row in rows:
        shares = ["" if row.get(key) is None else f"{row[key]:.2f} %" for key in ("precision", "recall", "f1")]
        cells = [_value(row["name"]), f"{row['images']:,}", *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines), *_confusion(r)]


def _confusion(r: Mapping[str, Any]) -> list[str]:
    """The confusion matrix as a table, or for many classes the most frequent confusions."""
    if not (matrix := r.get("confusion")):
        return []
    names = [_value(row["name"]) for row in r["classes"]]
    if len(names) <= _MATRIX_CLASSES:
        heading = ["| true class | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        lines = [f"| {name} | {' | '.join(map(str, row))} |" for name, row in zip(names, matrix, strict=True)]
        return ["\n".join(heading + lines)]
    pairs = [(matrix[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
    most = [pair for pair in sorted(pairs, key=lambda pair: -pair[0])[:_CONFUSED_PAIRS] if pair[0]]
    lines = ["| true class | predicted | images |", "|---|---|---|", *(f"| {a} | {b} | {n} |" for n, a, b in most)]
    return ["\n".join(lines)]


def _terms(data: DataSet) -> str:
    """Under which terms the images are published, and where."""
    place = f", {data.read.url}" if isinstance(data.read, ClassFolders) else ""
    return f" Terms of the images: {data.license}{place}." if data.license else ""


def _training(checkpoint: Checkpoint) -> str:
    r, training = checkpoint.results, checkpoint.training
    known = {key: value for key, value in training["recipe"].items() if value not in (None, "", {}, [], ())}
    if "penalty" in r:  # fitted at once, without the optimizer of the recipe
        known = {key: value for key, value in known.items() if key in _OF_FITTED} | {"penalty": r["penalty"]}
    if not checkpoint.is_trained:
        known = {key: value for key, value in known.items() if key in ("model", "dataset", "lr", "start", "model_args")}
    if not {"teachers", "soft_labels"} & known.keys():
        known.pop("teacher_weight", None)
    known |= {key: training[key] for key in ("mean", "std", "split_by") if training.get(key)}
    table = "\n".join(f"| {name} | {_value(value)} |" for name, value in known.items())
    versions = ", ".join(f"{'Python' if name == 'python' else name} {value}" for name, value in r["versions"].items())
    text = f"{training['text']} " if training.get("text") else ""
    origin = str(r.get("start") or "random weights").replace("{seed}", str(training["recipe"].get("seed")))
    start = f"Started from {origin}. "
    trained = f"Trained in {_duration(r['training_seconds'])}" if checkpoint.is_trained else "Validated"
    took = f"{start}{trained} on {r['machine']}; {versions}."
    return f"""{wrapped(text + took)}

    {r["command"]}

| setting | value |
|---|---|
{table}

Weights: sha256 `{r["weights_sha256"]}`."""


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


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
    if keys:
        return PAPERS[keys[0]]
    return None if own_module(architecture) else paper_of(architecture)


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _value(value: Any) -> str:
    return setting_text(value).replace("|", "\\|")
