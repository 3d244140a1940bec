"""Renders a model card and the table of results; every number comes from results.json or the papers' table."""

from typing import Any

from common import recipe_text
from huggingface_hub import EvalResult, ModelCardData
from papers import PAPERS, ROWS

__all__ = ["render_card", "render_table"]

DATASETS = {
    "rotmnist": (
        "Rotated MNIST, regenerated",
        "rotated MNIST made anew from MNIST: 10,000 training and 2,000 validation digits from MNIST's training split, "
        "50,000 test digits from the rest of it and MNIST's test split, each turned by a random angle with bicubic "
        "interpolation. It has the sizes and the law of the original set but not its digits, so numbers on the two are "
        "close, not the same",
    )
}


def render_table(results: list[dict[str, Any]]) -> str:
    """The table of results, a row a checkpoint."""
    lines = [
        "| checkpoint | group | parameters | test error | paper | same class at all quarter turns | error under p4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        row = ROWS[r["checkpoint"]]
        lines.append(
            f"| [{r['checkpoint']}](model_cards/{r['checkpoint']}) | {r['group']} | {r['parameters']:,} "
            f"| {r['test_error']:.2f} % | {row.error} % | {r['same_class_at_all_quarter_turns']:.2f} % "
            f"| {r['equivariance_error_p4']:.0e} |"
        )
    return "\n".join(lines)


def render_card(r: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> str:
    """The README.md of a checkpoint's Hub repo."""
    name, recipe = r["checkpoint"], r["recipe"]
    row, (data_name, data_text) = ROWS[name], DATASETS[r["dataset"]["name"]]
    paper = PAPERS[row.paper]
    front = ModelCardData(
        license="mit",
        library_name="eqzoo",
        pipeline_tag="image-classification",
        tags=["image-classification", "equivariance", r["group"]],
        datasets=["mnist"],
        metrics=["accuracy"],
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=r["dataset"]["name"],
                dataset_name=data_name,
                dataset_split="test",
                metric_type="accuracy",
                metric_value=round(100 - r["test_error"], 3),
            )
        ],
    )
    turns = ", ".join(f"{error:.2f} %" for error in r["test_error_of_turned_copies"])
    promise = (
        "It makes no promise about turns: it is the plain baseline."
        if r["group"] == "z2"
        else f"It is exact for the group {r['group']}, by construction."
    )
    channels, height, width = config["pretrained_cfg"]["input_size"]
    return f"""---
{front.to_yaml()}
---

# {name}

`{config["architecture"]}` of {paper.short}, [{paper.title}]({paper.url}), trained on {data_text}.
{promise}

## Use

```python
import eqzoo

model = eqzoo.create_model("{name}", pretrained=True).eval()
```

After `import eqzoo`, `timm.create_model("{name}", pretrained=True)` gives the same, and from a shell
`eqzoo predict PICTURE --model {name}`. Pictures are {channels} x {height} x {width}, white on black, with pixels in
[0, 1] standardised by mean {config["pretrained_cfg"]["mean"][0]} and standard deviation {
        config["pretrained_cfg"]["std"][0]
    }; digits upright or turned by any angle, not
transposed.

## Results

| | |
|---|---|
| test error, {r["dataset"]["test"]:,} digits | {r["test_error"]:.3f} % ({r["seeds"]} seed) |
| in the paper | {row.error} % ({row.note}) |
| validation error, {r["dataset"]["valid"]:,} digits | {r["valid_error"]:.3f} %, epoch {r["selected_epoch"]} of {
        recipe["epochs"]
    } |
| test error at 0, 90, 180, 270 degrees more | {turns} |
| digits with the same class at all four | {r["same_class_at_all_quarter_turns"]:.3f} % |
| equivariance error, own group {r["group"]} | {r["equivariance_error"]:.1e} |
| equivariance error, p4 | {r["equivariance_error_p4"]:.1e} |
| parameters | {r["parameters"]:,} in {len(shapes)} tensors |

The epoch was chosen on the validation digits, and the test digits were read after that, once for each recipe that was
tried (see below). The equivariance error is the largest relative change `‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖` of layers,
features and logits over all elements of the group, in float64; `eqzoo.equivariance_error(model)` measures it again.

## Training

{recipe["optimizer"].capitalize()}, batch {recipe["batch_size"]}, learning rate {recipe["lr"]:g} with {
        recipe["schedule"]
    } schedule, weight decay {recipe["weight_decay"]:g}, {recipe["epochs"]} epochs, seed {recipe["seed"]}, no
augmentation. {recipe_text(name)} {r["training_seconds"] / 60:.0f} minutes on {r["machine"]}; Python {
        r["versions"]["python"]
    }, torch {r["versions"]["torch"]}, timm {r["versions"]["timm"]}, eqzoo {r["versions"]["eqzoo"]}.

    {r["command"]}

Weights: sha256 `{r["weights_sha256"]}`.

## Limits

Made for single digits on a plain ground, to show and to test equivariance; it knows nothing else. Exactness holds for
quarter turns of the pixel grid{
        " and mirrors" if r["group"].endswith("m") else ""
    }; between them the network is only as stable as training made it.

## Citation

```bibtex
{paper.bibtex}
```
"""
