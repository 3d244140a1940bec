"""Makes the Hub repo folder of an evaluated run: `python training/publish.py runs/p4_cnn.rotmnist/seed0`.

Writes `model_cards/<checkpoint>/`, laid out as its Hub repo: model.safetensors, config.json, results.json, the card
README.md and its curves; and renders the tables of results in README.md. The user's own checkpoint, such as a
fine-tuned network, goes to the folder that `--output` names. Nothing leaves the machine without `--push OWNER`, which
makes the repo `OWNER/<checkpoint>` if need be and uploads what differs in one commit. A folder that is already made can
be given in place of a run, to be pushed. `--render` renders all cards and tables anew, from the results.json they have;
`--render --time` measures the throughput of all checkpoints before, one after the other, so that the cards agree on the
machine and its load.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import is_recipe_of, load_recipe, recipe_names, recipe_text

import eqzoo
from eqzoo._common import atomic, json_text, write_json
from eqzoo.analysis import throughput
from eqzoo.cards import (
    check_loads,
    check_weights,
    draw_rotation_curve,
    draw_training_curve,
    full_size_accuracies,
    published_config,
    render_card,
    render_table,
    weights_dtype,
)
from eqzoo.cards.dataset_texts import DATASETS, dataset
from eqzoo.engine import Recipe
from eqzoo.engine.report_files import REPORT_NAME
from eqzoo.engine.run_directory import SETTINGS_NAME
from eqzoo.export import metadata
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.hub import CONFIG_NAME, HUB_OWNER, RESULTS_NAME, WEIGHTS_NAME, PushError, push, sha256_of
from eqzoo.models.loading import load_network

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
START, END = "<!-- results: rendered by training/publish.py -->", "<!-- end of results -->"
CARD_NAME, ONNX_NAME = "README.md", "model.onnx"
CURVE_NAMES = ROTATION_CURVE_NAME, TRAINING_CURVE_NAME = "rotation_curve.svg", "training_curve.svg"
REPO_FILES = (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME, CARD_NAME, *CURVE_NAMES, ONNX_NAME)
GIT_LIMIT = 16_000_000  # bytes of a checkpoint that git holds
ROUNDS = 3  # measurements of the throughput of a checkpoint, of which the median is taken


def main(argv: list[str] | None = None) -> None:
    """Parses, makes the folders, and pushes them if asked to."""
    args = _parse(argv)
    try:
        _publish(args)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _publish(args: argparse.Namespace) -> None:
    for run in args.run:
        results = _read_results(run)
        if args.checkpoint:
            results["checkpoint"] = args.checkpoint
        for key in ("label_names", "license", "base_model"):
            if value := getattr(args, key) or _of_start(run).get(key):
                results[key] = value
        repo_id = f"{args.push}/{results['checkpoint']}" if args.push else None
        if _is_repo_folder(run):
            folder = run.resolve()
        else:
            folder = (args.output or CARDS / results["checkpoint"]).resolve()
            build(run, folder, results, repo_id, args.replace)
        if args.onnx:
            _export(folder)
        if repo_id:
            _push(folder, repo_id, args.replace, args.private)
    if args.time:
        _time_all()
    if args.render or any(not _is_repo_folder(run) for run in args.run):
        for path, text in rendered().items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                atomic(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
                print(path.relative_to(ROOT))


def build(run: Path, folder: Path, results: dict[str, Any], repo_id: str | None, replace: bool = False) -> None:
    """Makes the folder of a checkpoint; everything is read, checked and rendered before the first file is written.

    Args:
        run: The folder of an evaluated run.
        folder: The folder to make.
        results: Its results, with what was said of the checkpoint besides.
        repo_id: The Hub repo that the card of the user's own checkpoint should name, or None.
        replace: Whether other weights that are in the folder may be replaced.

    Raises:
        ValueError: If something is missing or does not belong together.
        SystemExit: If something is in the way.
    """
    ours = _is_ours(folder)
    weights = run / ("best.safetensors" if weights_dtype(results) == "float32" else "best.half.safetensors")
    check_weights(weights, results, _way_to_new_results(run))
    if ours:
        _check_ours(results, weights)
    config = published_config(results, weights)
    check_loads(config, weights, results["dataset"]["name"] if ours else None)
    if ours and not _is_of_its_recipe(results):
        raise SystemExit(
            f"the run has other settings than the recipe {results['checkpoint']}, as its command says: "
            f"{results['command']}; name a folder with --output DIR"
        )
    others = (folder / WEIGHTS_NAME).is_file() and sha256_of(folder / WEIGHTS_NAME) != sha256_of(weights)
    if others and not replace:
        raise SystemExit(f"{folder} holds other weights; --replace puts these in their place, --output names another")
    texts = _texts(results, config, weights.stat().st_size, repo_id or _own_repo(results, ours), folder, ours)
    data = weights.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others:
            (folder / ONNX_NAME).unlink(missing_ok=True)
        atomic(folder / WEIGHTS_NAME, lambda path: path.write_bytes(data))
        for name, text in texts.items():
            atomic(folder / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))
        for name in set(CURVE_NAMES) - texts.keys():
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise SystemExit(f"{folder} cannot be written ({error})") from error
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
            folder / RESULTS_NAME, _read_results(folder) | {"throughput": measured[0] | {"images_per_second": rate}}
        )


def rendered() -> dict[Path, str]:
    """Every text that is rendered from results.json: the files beside the weights, and README.md with its tables."""
    folders = sorted(path.parent for path in CARDS.glob(f"*/{RESULTS_NAME}"))
    results = {folder: json.loads((folder / RESULTS_NAME).read_text(encoding="utf-8")) for folder in folders}
    texts = {}
    for folder, result in results.items():
        weights = folder / WEIGHTS_NAME
        config = published_config(result, weights)
        found = _texts(result, config, weights.stat().st_size, _own_repo(result, True), folder, True)
        texts |= {folder / name: text for name, text in found.items()}
    readme = (ROOT / CARD_NAME).read_text(encoding="utf-8")
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    texts[ROOT / CARD_NAME] = f"{before}{START}\n{render_table(list(results.values()))}\n{END}{after}"
    return texts


def _texts(
    results: dict[str, Any], config: dict[str, Any], size: int, repo_id: str | None, folder: Path, ours: bool
) -> dict[str, str]:
    place = str(folder.relative_to(ROOT)) if ours else folder.name
    said = recipe_text(results["checkpoint"]) if _is_of_its_recipe(results) else ""
    texts = {
        RESULTS_NAME: json_text(results),
        CONFIG_NAME: json_text(config),
        CARD_NAME: render_card(results, config, size, repo_id, place, ours, said),
    }
    name, noun = results["checkpoint"], dataset(results["dataset"]["name"]).noun
    if curve := results.get("rotation_curve"):
        texts[ROTATION_CURVE_NAME] = draw_rotation_curve(curve["angles"], curve["accuracy"], name, noun)
    if accuracies := full_size_accuracies(results):
        kept, first = results["selected_epoch"], len(results["valid_accuracies"]) - len(accuracies) + 1
        texts[TRAINING_CURVE_NAME] = draw_training_curve(accuracies, kept, name, noun, first)
    return texts


def _export(folder: Path) -> None:
    """Writes the deployed network beside its weights; the same weights give the same bytes."""
    try:
        print(eqzoo.export_onnx(load_network(folder).network, folder / ONNX_NAME))
    except (ImportError, eqzoo.ExportError) as error:
        raise SystemExit(f"{folder / ONNX_NAME} is not written: {error}") from error


def _push(folder: Path, repo_id: str, replace: bool, private: bool) -> None:
    results, weights = _read_results(folder), folder / WEIGHTS_NAME
    check_weights(weights, results, "publish the run again")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    _check_onnx(folder)
    files: dict[str, Path | bytes] = {name: folder / name for name in REPO_FILES if (folder / name).is_file()}
    # The card names the repo that it is in, which need not be the one that the local card names.
    ours = _is_ours(folder)
    card = _texts(results, config, weights.stat().st_size, repo_id, folder, ours)[CARD_NAME]
    files[CARD_NAME] = card.encode()
    try:
        changed = push(files, repo_id, f"Publish {results['checkpoint']}", replace, private)
    except PushError as error:
        raise SystemExit(f"{error}; {folder} is as it was") from error
    print(f"pushed {', '.join(changed)} to {repo_id}" if changed else f"{repo_id} has all of it; nothing was uploaded")


def _check_onnx(folder: Path) -> None:
    """Raises SystemExit if there is an ONNX file that was not made of these weights, with these classes."""
    path = folder / ONNX_NAME
    if not path.is_file():
        return
    try:
        found = OnnxFile(path).metadata
    except (ImportError, ValueError) as error:
        raise SystemExit(f"{path} cannot be compared with the weights: {error}") from error
    expected = metadata(load_network(folder).network)
    if wrong := [key for key in ("weights_sha256", "classes") if found.get(key) != expected[key]]:
        raise SystemExit(
            f"{path} was not made of the checkpoint beside it, its {' and '.join(wrong)} differ; remove it, or write "
            "it anew with --onnx"
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="*", help="folders of evaluated runs, or finished folders to push")
    parser.add_argument("--render", action="store_true", help="render all cards and the tables of README.md anew")
    parser.add_argument("--time", action="store_true", help="with --render: measure the throughput of all before")
    parser.add_argument("--push", metavar="OWNER", help="upload to the Hub repo OWNER/<checkpoint>")
    parser.add_argument("--private", action="store_true", help="a repo that --push creates is private, not public")
    parser.add_argument(
        "--replace", action="store_true", help="replace different weights, in the folder and on the Hub"
    )
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too, checked against the network")
    own = parser.add_argument_group("the user's own checkpoint")
    own.add_argument(
        "--output", type=Path, metavar="DIR", help="the folder to make (default: model_cards/<checkpoint>)"
    )
    own.add_argument("--checkpoint", metavar="NAME", help="another name than <model>.<data set>")
    own.add_argument("--label-names", nargs="+", metavar="NAME", help="the classes, in the order of their numbers")
    own.add_argument("--license", help="the license of the weights, as the Hub names it (default: mit)")
    own.add_argument("--base-model", metavar="REPO", help="the Hub repo that the network was fine-tuned from")
    args = parser.parse_args(argv)
    if bool(args.run) == args.render:
        parser.error("name runs or finished folders, or --render")
    made = [run for run in args.run if _is_repo_folder(run)]
    own_flags = (args.output, args.checkpoint, args.label_names, args.license, args.base_model)
    if any(own_flags) and (made or len(args.run) != 1):
        parser.error("what is said of the user's own checkpoint goes with one run")
    if any(own_flags[1:]) and not args.output:
        parser.error("the user's own checkpoint needs --output DIR; model_cards holds those of the zoo")
    if args.private and not args.push:
        parser.error("--private goes with --push OWNER")
    if args.time and not args.render:
        parser.error("--time goes with --render")
    if made and not (args.push or args.onnx):
        parser.error(f"{made[0]} is a finished folder; there is nothing to do with it without --push OWNER or --onnx")
    return args


def _read_results(run: Path) -> dict[str, Any]:
    path = run / RESULTS_NAME
    if not path.is_file():
        raise SystemExit(f"no {path}; {_way_to_results(run)}")
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path} is not JSON ({error}); {_way_to_new_results(run)}") from error
    return results


def _way_to_results(run: Path) -> str:
    """How a run without results comes to have them."""
    if (run / REPORT_NAME).is_file():
        return (
            "the network was fine-tuned without test images, and a card has a test error: fine-tune it into a new "
            "folder with some, by --test 0.15 or a folder test"
        )
    if (run / SETTINGS_NAME).is_file():
        return "the fine-tuning has not ended; give its eqzoo finetune command again"
    return f"run python training/evaluate.py {run} first"


def _way_to_new_results(run: Path) -> str:
    """How a run whose results are wrong comes to have others."""
    if (run / SETTINGS_NAME).is_file():
        return "give its eqzoo finetune command again"
    return f"run python training/evaluate.py {run} again"


def _of_start(run: Path) -> dict[str, str]:
    """The license of a fine-tuned run, which is that of the weights that it started from."""
    path = run / CONFIG_NAME
    found = json.loads(path.read_text(encoding="utf-8"))["pretrained_cfg"].get("license") if path.is_file() else None
    return {"license": found} if found else {}


def _is_repo_folder(run: Path) -> bool:
    if (run / "recipe.json").is_file():  # a fine-tuned run, whose folder can be loaded as it is
        return False
    return all((run / name).is_file() for name in (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME))


def _is_ours(folder: Path) -> bool:
    return folder.parent == CARDS


def _own_repo(results: dict[str, Any], ours: bool) -> str | None:
    return f"{HUB_OWNER}/{results['checkpoint']}" if ours else None


def _is_of_its_recipe(results: dict[str, Any]) -> bool:
    """Whether the run has the settings of the recipe that its checkpoint is named after."""
    if results["checkpoint"] not in recipe_names():
        return False
    return Recipe(**results["recipe"] | {"seed": 0}) == replace(load_recipe(results["checkpoint"]), seed=0)


def _check_ours(results: dict[str, Any], weights: Path) -> None:
    name, data = results["checkpoint"], results["dataset"]["name"]
    model = results["recipe"]["model"]
    if data not in DATASETS or not (name == f"{model}.{data}" or is_recipe_of(name, model, data)):
        raise SystemExit(f"{name} is of the data set {data}, which is not the zoo's; name a folder with --output DIR")
    if weights.stat().st_size > GIT_LIMIT:
        raise SystemExit(
            f"{weights} has {weights.stat().st_size / 1e6:.1f} MB, and git takes up to {GIT_LIMIT / 1e6:.0f}: evaluate "
            "it in half precision with python training/evaluate.py --half, or name a folder with --output DIR"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
