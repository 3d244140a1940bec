"""Takes the folder of an evaluated run into the zoo: `python training/publish.py runs/p4_cnn.rotmnist/seed0`.

Copies its files to `model_cards/<checkpoint>/`, which is its Hub repo, and renders the tables of README.md and docs
(tables.py). Nothing leaves the machine without `--push OWNER`, which makes the repo `OWNER/<checkpoint>` if
need be and uploads what differs in one commit. `--render` renders all cards and tables anew.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import load_recipe, recipe_names
from tables import rendered_pages

from eqzoo._common import write_text
from eqzoo.analysis.sizes import weightless
from eqzoo.cards import CARD_NAME, REPO_FILES, Checkpoint, export_beside, push_folder, read_checkpoint, render_card
from eqzoo.data import CATALOG
from eqzoo.engine import Recipe
from eqzoo.export import ExportError
from eqzoo.hub import HUB_OWNER, RESULTS_NAME, WEIGHTS_NAME
from eqzoo.models.builder import configured_name
from eqzoo.models.load import load_network

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
GIT_LIMIT = 16_000_000  # bytes of a checkpoint that git holds


def main(argv: list[str] | None = None) -> None:
    """Parses, copies the folders, and pushes them if asked to."""
    args = _parse(argv)
    try:
        folders = [add_to_zoo(run, args.replace) for run in args.run]
        for path, text in rendered().items():
            if path.read_text(encoding="utf-8") != text:
                write_text(path, text)
                print(path.relative_to(ROOT))
        for folder in folders:
            if args.onnx:
                print(export_beside(folder))
            if args.push:
                changed = push_folder(folder, f"{args.push}/{folder.name}", args.replace, args.private)
                print(f"{folder.name}: uploaded {', '.join(changed) or 'nothing, the Hub has all of it'}")
    except (ValueError, OSError, ImportError, ExportError) as error:
        raise SystemExit(str(error)) from error


def add_to_zoo(run: Path, replace_weights: bool = False) -> Path:
    """Copies the files of an evaluated run to the folder of its checkpoint, and returns that.

    Args:
        run: The folder of an evaluated run, or that of a checkpoint of the zoo, which stays as it is.
        replace_weights: Whether other weights that are there may be replaced.

    Raises:
        ValueError: If the run has other settings than the recipe of its name, its network is not the registered one,
            its file is larger than git takes, or the folder holds other weights.
    """
    checkpoint = read_checkpoint(run)
    if (dataset := checkpoint.results["data"]) not in CATALOG:
        raise ValueError(f"{dataset} is no data set of the zoo: `eqzoo publish` takes runs on your own images")
    check_network(run, checkpoint)
    if run.resolve().parent == CARDS:
        return run.resolve()
    check_recipe(checkpoint)
    if checkpoint.size > GIT_LIMIT:
        raise ValueError(f"{run / WEIGHTS_NAME} has more than {GIT_LIMIT / 1e6:.0f} MB: training/evaluate.py --half")
    folder = CARDS / checkpoint.name
    if folder.is_dir() and not replace_weights:
        before = read_checkpoint(folder).results["weights_sha256"]
        if before != checkpoint.results["weights_sha256"]:
            raise ValueError(f"{folder} holds other weights; --replace puts these in their place")
    folder.mkdir(parents=True, exist_ok=True)
    for name in REPO_FILES:
        (folder / name).unlink(missing_ok=True)
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    return folder


def check_recipe(checkpoint: Checkpoint) -> None:
    """Raises ValueError unless a run has the settings of the recipe that its checkpoint is named after."""
    recipe, name = Recipe(**checkpoint.training["recipe"]), checkpoint.name
    if name not in recipe_names() or replace(recipe, seed=0) != replace(load_recipe(name), seed=0):
        raise ValueError(f"{name} was not made by the recipe of its name: {checkpoint.results['command']}")


def check_network(run: Path, checkpoint: Checkpoint) -> None:
    """Raises ValueError unless the weights load through config.json, into the network that has the checkpoint's name.

    That network is the registered one, with its configuration for the data set.
    """
    recipe = Recipe(**checkpoint.training["recipe"])
    if checkpoint.name.partition(".")[0] != recipe.model:
        raise ValueError(f"{run} is called {checkpoint.name}, and its network is {recipe.model}")
    built = _described(load_network(run, pretrained=True).network)
    registered = _described(weightless(configured_name(recipe.model, recipe.dataset)))
    if differing := [key for key in registered if built[key] != registered[key]]:
        raise ValueError(
            f"the network of {run} is not the registered {checkpoint.name}: they differ in {', '.join(differing)}; "
            "train the registered one, or register this one under a name of its own"
        )


def _described(network: Any) -> dict[str, Any]:
    """What two networks of a name have in common: their configuration and the shapes of their weights."""
    cfg = {key: network.pretrained_cfg[key] for key in ("architecture", "input_size", "mean", "std", "num_classes")}
    cfg = {key: list(value) if isinstance(value, tuple) else value for key, value in cfg.items()}
    return cfg | {"the shapes of weights": {key: value.shape for key, value in network.state_dict().items()}}


def rendered() -> dict[Path, str]:
    """Every text that is rendered from results.json: the cards, and pages with tables."""
    found = {path.parent: read_checkpoint(path.parent) for path in sorted(CARDS.glob(f"*/{RESULTS_NAME}"))}
    texts = {
        folder / CARD_NAME: render_card(checkpoint, f"{HUB_OWNER}/{folder.name}")
        for folder, checkpoint in found.items()
    }
    return texts | rendered_pages(ROOT)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="*", help="folders of evaluated runs, or of checkpoints to push")
    parser.add_argument("--render", action="store_true", help="render all cards and tables anew")
    parser.add_argument("--push", metavar="OWNER", help="upload to the Hub repo OWNER/<checkpoint>")
    parser.add_argument("--private", action="store_true", help="a repo that --push creates is private, not public")
    parser.add_argument("--replace", action="store_true", help="replace different weights, here and on the Hub")
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too, checked against the network")
    args = parser.parse_args(argv)
    if bool(args.run) == args.render:
        parser.error("name runs or folders of checkpoints, or --render")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
