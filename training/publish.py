"""Makes the Hub repo folder of an evaluated run: `python training/publish.py runs/p4_cnn.rotmnist/seed0`.

Writes `model_cards/<checkpoint>/`, laid out as its Hub repo: model.safetensors, config.json, results.json, the card
README.md and its curves; and renders the tables of README.md and docs (tables.py). `eqzoo publish` makes such
a folder of the user's own checkpoint. Nothing leaves the machine without `--push OWNER`, which makes the repo
`OWNER/<checkpoint>` if need be and uploads what differs in one commit. A folder that is already made can be given in
place of a run, to be pushed. `--render` renders all cards and tables anew, from the results.json they have; `--render
--time` measures the throughput of all checkpoints before, one after the other, so that the cards agree on the machine
and its load.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import is_recipe_of, load_recipe, recipe_names, recipe_text
from tables import rendered_pages

from eqzoo._common import write_json, write_text
from eqzoo.analysis import throughput
from eqzoo.cards import (
    check_loads,
    evaluated_weights,
    export_beside,
    is_repo_folder,
    make_repo,
    published_config,
    push_repo,
    read_results,
    repo_texts,
)
from eqzoo.data import CATALOG
from eqzoo.engine import Recipe
from eqzoo.export import ExportError
from eqzoo.hub import HUB_OWNER, RESULTS_NAME, WEIGHTS_NAME, PushError
from eqzoo.models.load import load_network

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
GIT_LIMIT = 16_000_000  # bytes of a checkpoint that git holds
ROUNDS = 3  # measurements of the throughput of a checkpoint, of which the median is taken


def main(argv: list[str] | None = None) -> None:
    """Parses, makes the folders, and pushes them if asked to."""
    args = _parse(argv)
    try:
        _publish(args)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error


def _publish(args: argparse.Namespace) -> None:
    for run in args.run:
        results = read_results(run)
        repo_id = f"{args.push}/{results['checkpoint']}" if args.push else None
        if is_repo_folder(run):
            folder = run.resolve()
        else:
            folder = (CARDS / results["checkpoint"]).resolve()
            build(run, folder, results, args.replace)
        if args.onnx:
            _export(folder)
        if repo_id:
            _push(folder, repo_id, args.replace, args.private)
    if args.time:
        _time_all()
    if args.render or any(not is_repo_folder(run) for run in args.run):
        for path, text in rendered().items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
                print(path.relative_to(ROOT))


def build(run: Path, folder: Path, results: dict[str, Any], replace: bool = False) -> None:
    """Makes the folder of a checkpoint; everything is read, checked and rendered before the first file is written.

    Args:
        run: The folder of an evaluated run.
        folder: The folder to make.
        results: Its results.
        replace: Whether other weights that are in the folder may be replaced.

    Raises:
        ValueError: If something is missing, in the way, or does not belong together.
        OSError: If the folder cannot be written.
    """
    weights = evaluated_weights(run, results)
    _check_ours(results, weights)
    check_loads(published_config(results, weights), weights, results["dataset"]["name"])
    if not _is_of_its_recipe(results):
        raise ValueError(
            f"the run has other settings than the recipe {results['checkpoint']}, as its command says: "
            f"{results['command']}; it is not one of the zoo: eqzoo publish makes a folder of it"
        )
    make_repo(weights, folder, results, _own_repo(results), replace, **_of_zoo(results, folder))
    print(f"made {folder}")


def _time_all() -> None:
    """Measures the throughput of all checkpoints in turn, three times, and writes the medians to results.json."""
    folders = sorted(path.parent for path in CARDS.glob(f"*/{RESULTS_NAME}"))
    found: dict[Path, list[dict[str, Any]]] = {folder: [] for folder in folders}
    for _ in range(ROUNDS):
        for folder in folders:
            network = load_network(folder).network
            found[folder].append(throughput(network, network.pretrained_cfg["input_size"]))
    for folder, measured in found.items():
        rate = statistics.median(row["images_per_second"] for row in measured)
        print(f"{folder.name}: {rate:,.0f} images/s")
        write_json(
            folder / RESULTS_NAME, read_results(folder) | {"throughput": measured[0] | {"images_per_second": rate}}
        )


def rendered() -> dict[Path, str]:
    """Every text that is rendered from results.json: the files beside the weights, and pages with tables."""
    folders = sorted(path.parent for path in CARDS.glob(f"*/{RESULTS_NAME}"))
    results = {folder: json.loads((folder / RESULTS_NAME).read_text(encoding="utf-8")) for folder in folders}
    texts = {}
    for folder, result in results.items():
        weights = folder / WEIGHTS_NAME
        config = published_config(result, weights)
        found = repo_texts(result, config, weights.stat().st_size, _own_repo(result), **_of_zoo(result, folder))
        texts |= {folder / name: text for name, text in found.items()}
    return texts | rendered_pages(ROOT)


def _of_zoo(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the card of a checkpoint of the zoo says besides its results."""
    said = recipe_text(results["checkpoint"]) if _is_of_its_recipe(results) else ""
    return {"place": str(folder.relative_to(ROOT)), "ours": True, "said": said}


def _export(folder: Path) -> None:
    try:
        print(export_beside(folder))
    except (ImportError, ExportError) as error:
        raise SystemExit(f"{folder / 'model.onnx'} is not written: {error}") from error


def _push(folder: Path, repo_id: str, replace: bool, private: bool) -> None:
    try:
        ours = _of_zoo(read_results(folder), folder) if folder.parent == CARDS else {}
        changed = push_repo(folder, repo_id, replace, private, **ours)
    except PushError as error:
        raise SystemExit(f"{error}; {folder} is as it was") from error
    print(f"pushed {', '.join(changed)} to {repo_id}" if changed else f"{repo_id} has all of it; nothing was uploaded")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="*", help="folders of evaluated runs, or finished folders to push")
    parser.add_argument(
        "--render", action="store_true", help="render all cards, and the tables of README.md and docs/results.md anew"
    )
    parser.add_argument("--time", action="store_true", help="with --render: measure the throughput of all before")
    parser.add_argument("--push", metavar="OWNER", help="upload to the Hub repo OWNER/<checkpoint>")
    parser.add_argument("--private", action="store_true", help="a repo that --push creates is private, not public")
    parser.add_argument(
        "--replace", action="store_true", help="replace different weights, in the folder and on the Hub"
    )
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too, checked against the network")
    args = parser.parse_args(argv)
    if bool(args.run) == args.render:
        parser.error("name runs or finished folders, or --render")
    made = [run for run in args.run if is_repo_folder(run)]
    if args.private and not args.push:
        parser.error("--private goes with --push OWNER")
    if args.time and not args.render:
        parser.error("--time goes with --render")
    if made and not (args.push or args.onnx):
        parser.error(f"{made[0]} is a finished folder; there is nothing to do with it without --push OWNER or --onnx")
    return args


def _own_repo(results: dict[str, Any]) -> str:
    return f"{HUB_OWNER}/{results['checkpoint']}"


def _is_of_its_recipe(results: dict[str, Any]) -> bool:
    """Whether the run has the settings of the recipe that its checkpoint is named after."""
    if results["checkpoint"] not in recipe_names():
        return False
    return Recipe(**results["recipe"] | {"seed": 0}) == replace(load_recipe(results["checkpoint"]), seed=0)


def _check_ours(results: dict[str, Any], weights: Path) -> None:
    name, data = results["checkpoint"], results["dataset"]["name"]
    model = results["recipe"]["model"]
    if data not in CATALOG or not (name == f"{model}.{data}" or is_recipe_of(name, model, data)):
        raise SystemExit(
            f"{name} is of the data set {data}, which is not the zoo's: eqzoo publish makes a folder of it"
        )
    if weights.stat().st_size > GIT_LIMIT:
        raise SystemExit(
            f"{weights} has {weights.stat().st_size / 1e6:.1f} MB, and git takes up to {GIT_LIMIT / 1e6:.0f}: evaluate "
            "it in half precision with python training/evaluate.py --half, or make a folder of it with eqzoo publish"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
