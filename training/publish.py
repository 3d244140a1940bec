"""Makes the Hub repo folder of an evaluated run: `python training/publish.py runs/p4_cnn.rotmnist/seed0`.

Writes `model_cards/<checkpoint>/` with model.safetensors, config.json, results.json and the card README.md, and renders
the table of results in README.md. `--render` renders all cards and the table anew, from the results.json they have.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import timm
from card import render_card, render_table
from safetensors.torch import load_file

import eqzoo
from eqzoo.files import atomic

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
START, END = "<!-- results: rendered by training/publish.py -->", "<!-- end of results -->"


def main() -> None:
    """Parses and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", type=Path, nargs="?", help="the folder of an evaluated run")
    what.add_argument("--render", action="store_true", help="render cards and table anew")
    args = parser.parse_args()
    if args.run:
        results = args.run / "results.json"
        if not results.is_file():
            raise SystemExit(f"no {results}; run python training/evaluate.py {args.run} first")
        publish(args.run, CARDS / json.loads(results.read_text())["checkpoint"])
    for path, text in rendered().items():
        atomic(path, lambda temporary, text=text: temporary.write_text(text))
        print(path.relative_to(ROOT))


def publish(run: Path, folder: Path) -> None:
    """Copies weights and results of a run into the folder of its checkpoint, and writes its config.json."""
    results = json.loads((run / "results.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    atomic(folder / "model.safetensors", lambda path: shutil.copyfile(run / "best.safetensors", path))
    config = json.dumps(hub_config(results), indent=2) + "\n"
    atomic(folder / "config.json", lambda path: path.write_text(config))
    atomic(folder / "results.json", lambda path: shutil.copyfile(run / "results.json", path))


def hub_config(results: dict[str, Any]) -> dict[str, Any]:
    """The config.json that timm's ``hf-hub:`` and ``local-dir:`` read; our own entries stand under ``eqzoo``."""
    cfg = timm.get_pretrained_cfg(results["checkpoint"]).to_dict()
    source = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "architecture", "state_dict")
    model = eqzoo.create_model(results["checkpoint"], **results["recipe"]["model_args"])
    return {
        "architecture": results["recipe"]["model"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool.reduce,
        "label_names": list(cfg.pop("label_names", ())),
        "model_args": {"num_classes": model.num_classes, "in_chans": model.in_chans} | results["recipe"]["model_args"],
        "pretrained_cfg": {name: value for name, value in cfg.items() if value is not None and name not in source},
        "eqzoo": {"version": results["versions"]["eqzoo"], "group": results["group"]},
    }


def rendered() -> dict[Path, str]:
    """Every text that is rendered from results.json: the cards, and README.md with its table."""
    folders = sorted(path.parent for path in CARDS.glob("*/results.json"))
    results = {folder: json.loads((folder / "results.json").read_text()) for folder in folders}
    texts = {}
    for folder, result in results.items():
        sizes = {name: tuple(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
        texts[folder / "README.md"] = render_card(result, json.loads((folder / "config.json").read_text()), sizes)
    readme = (ROOT / "README.md").read_text()
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    texts[ROOT / "README.md"] = f"{before}{START}\n{render_table(list(results.values()))}\n{END}{after}"
    return texts


if __name__ == "__main__":
    main()
