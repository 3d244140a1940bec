"""The folder of a checkpoint's Hub repo: made of an evaluated run, completed by an ONNX file, uploaded."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._common import atomic, json_text, write_text
from ..data import dataset
from ..engine.run import REPORT_NAME, SETTINGS_NAME, TRAINING_NAME
from ..export.programs import metadata
from ..hub import CONFIG_NAME, HUB_OWNER, RESULTS_NAME, WEIGHTS_NAME, push, sha256_of
from ..models import EquivariantNet
from ..models.load import load_network
from .card import full_size_accuracies, render_card
from .checkpoint import check_loads, check_weights, published_config, weights_dtype
from .curves_svg import draw_rotation_curve, draw_training_curve

__all__ = [
    "CARD_NAME",
    "ONNX_NAME",
    "REPO_FILES",
    "check_name",
    "edited_card",
    "evaluated_weights",
    "export_beside",
    "is_repo_folder",
    "license_of_start",
    "make_repo",
    "push_repo",
    "read_results",
    "repo_texts",
    "with_label_names",
]

CARD_NAME, ONNX_NAME = "README.md", "model.onnx"
_CURVES = _ROTATION_CURVE, _TRAINING_CURVE = "rotation_curve.svg", "training_curve.svg"
REPO_FILES = (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME, CARD_NAME, *_CURVES, ONNX_NAME)


def read_results(run: Path) -> dict[str, Any]:
    """The results.json of an evaluated run, or of a fine-tuning.

    Raises:
        ValueError: If there is none, or it is not JSON; the message says how the run comes to have it.
    """
    path = run / RESULTS_NAME
    if not run.is_dir():
        raise ValueError(f"no folder {run}; give the one that eqzoo finetune wrote, or the folder of an evaluated run")
    if not path.is_file():
        raise ValueError(f"no {path}; {_way_to_results(run)}")
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {_way_to_new_results(run)}") from error
    if not isinstance(results, dict) or not isinstance(results.get("checkpoint"), str):
        raise ValueError(f"{path} holds no results of a checkpoint; {_way_to_new_results(run)}")
    check_name(results["checkpoint"], str(path))
    return results


def check_name(name: str, source: str) -> None:
    """Raises ValueError unless a checkpoint's name, which is that of its folder and of its Hub repo, is no path."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{source}: the name of a checkpoint has letters, digits, underscores, dots and dashes, got {name!r}"
        )


def with_label_names(results: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The results of classes that were numbers, with names for them.

    Raises:
        ValueError: If the classes have names already, there are more or fewer of them, or two are equal.
    """
    before = [*(results.get("label_names") or ()), *(row["name"] for row in results.get("classes") or ())]
    if named := [name for name in before if not name.isdecimal()]:
        raise ValueError(
            f"the classes have names already, {named[0]!r} and others, that of their folders; another order would "
            "mislabel the predictions. To rename them, rename the folders before the fine-tuning"
        )
    rows = results.get("classes") or []
    if rows and len(rows) != len(names):
        raise ValueError(f"{len(names)} names for {len(rows)} classes: {', '.join(names)}")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two classes are named {twice[0]!r}; give each a name of its own")
    renamed = results | {"label_names": list(names)}
    if rows:
        renamed["classes"] = [row | {"name": name} for row, name in zip(rows, names, strict=True)]
    return renamed


def license_of_start(run: Path, results: Mapping[str, Any]) -> dict[str, str | None]:
    """The ``license`` of a run, which is that of the weights that it started from; None without any.

    A fine-tuning names it in its config.json; of other runs the start is known only if it is a checkpoint of eqzoo.
    """
    path = run / CONFIG_NAME
    if not path.is_file():
        return {"license": "mit" if str(results.get("base_model")).startswith(f"{HUB_OWNER}/") else None}
    try:
        return {"license": json.loads(path.read_text(encoding="utf-8"))["pretrained_cfg"].get("license")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no configuration of a checkpoint; {_way_to_new_results(run)}") from error


def is_repo_folder(run: Path) -> bool:
    """Whether a folder is laid out as a repo; that of a fine-tuned run, which can be loaded too, is not."""
    if (run / TRAINING_NAME).is_file():
        return False
    return all((run / name).is_file() for name in (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME))


def evaluated_weights(run: Path, results: Mapping[str, Any]) -> Path:
    """The weights of a run that were evaluated.

    Raises:
        ValueError: If they are missing or others.
    """
    weights = run / (WEIGHTS_NAME if weights_dtype(results) == "float32" else "model.half.safetensors")
    check_weights(weights, results, _way_to_new_results(run))
    return weights


def repo_texts(
    results: dict[str, Any],
    config: dict[str, Any],
    size: int,
    repo_id: str | None,
    place: str,
    ours: bool = False,
    said: str = "",
) -> dict[str, str]:
    """The files beside the weights, by name: results.json, config.json, the card and its curves.

    Args:
        results: The content of results.json.
        config: That of config.json.
        size: The bytes of the weights.
        repo_id: The Hub repo that the card names; None for a card that names no repo.
        place: The folder that it names.
        ours: Whether it is a checkpoint of this package.
        said: A paragraph on its recipe.
    """
    texts = {
        RESULTS_NAME: json_text(results),
        CONFIG_NAME: json_text(config),
        CARD_NAME: render_card(results, config, size, repo_id, place, ours, said),
    }
    name, noun = results["checkpoint"], dataset(results["dataset"]["name"]).noun
    if curve := results.get("rotation_curve"):
        texts[_ROTATION_CURVE] = draw_rotation_curve(curve["angles"], curve["accuracy"], name, noun)
    if accuracies := full_size_accuracies(results):
        kept, first = results["selected_epoch"], len(results["valid_accuracies"]) - len(accuracies) + 1
        texts[_TRAINING_CURVE] = draw_training_curve(accuracies, kept, name, noun, first)
    return texts


def make_repo(
    weights: Path,
    folder: Path,
    results: dict[str, Any],
    repo_id: str | None = None,
    replace: bool = False,
    place: str | None = None,
    ours: bool = False,
    said: str = "",
) -> None:
    """Makes the folder of a checkpoint; everything is read, checked and rendered before the first file is written.

    Args:
        weights: The weights, see `evaluated_weights`.
        folder: The folder to make.
        results: Their results, with what was said of the checkpoint besides.
        repo_id: The Hub repo that the card should name; None if it is not known.
        replace: Whether other weights that are in the folder, or an edited card, may be replaced.
        place: The folder that the card should name; None for the name of the repo or, without one, of ``folder``.
        ours: Whether it is a checkpoint of this package.
        said: A paragraph on its recipe, for the card.

    Raises:
        ValueError: If something is missing or does not belong together, or the folder has other weights, a card that
            was edited, or files of other kinds that would be overwritten.
        OSError: If the folder cannot be written.
    """
    config = published_config(results, weights)
    check_loads(config, weights, results["dataset"]["name"] if ours else None)
    others = (folder / WEIGHTS_NAME).is_file() and sha256_of(folder / WEIGHTS_NAME) != sha256_of(weights)
    if others and not replace:
        raise ValueError(f"{folder} holds other weights; --replace puts these in their place, or name another folder")
    if not (ours or replace) and edited_card(folder, repo_id):
        raise ValueError(
            f"{folder / CARD_NAME} was edited, or is of an earlier version of eqzoo, and would be overwritten; eqzoo "
            f"publish {folder} uploads it as it is, --replace writes it anew, or name another folder"
        )
    there = [name for name in REPO_FILES if (folder / name).exists()]
    if there and WEIGHTS_NAME not in there:
        raise ValueError(
            f"{folder} has {', '.join(there)}, which would be overwritten, and no {WEIGHTS_NAME} that they are of; "
            "name another folder"
        )
    place = place or (repo_id or "").rpartition("/")[2] or folder.resolve().name
    texts = repo_texts(results, config, weights.stat().st_size, repo_id, place, ours, said)
    data = weights.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others:
            (folder / ONNX_NAME).unlink(missing_ok=True)
        atomic(folder / WEIGHTS_NAME, lambda path: path.write_bytes(data))
        for name, text in texts.items():
            write_text(folder / name, text)
        for name in set(_CURVES) - texts.keys():
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error})") from error


def export_beside(folder: Path) -> str:
    """Writes the deployed network beside its weights, as ONNX; the same weights give the same bytes.

    Returns:
        What was checked.

    Raises:
        ExportError: If the file is not that of the network; it is then not written.
        ImportError: If the packages that write ONNX are missing.
    """
    from ..export.programs import export_onnx

    return str(export_onnx(_network_in(folder), folder / ONNX_NAME))


def _network_in(folder: Path) -> EquivariantNet:
    """The network of a checkpoint's folder, also of one that is called as a checkpoint of the zoo is."""
    return load_network(f"local-dir:{folder}").network


def edited_card(folder: Path, repo_id: str | None = None) -> str | None:
    """The card of a fine-tuned network's folder if it is not the one that was rendered; None if it is, or without one.

    Args:
        folder: The folder.
        repo_id: The Hub repo that the card may name, beside those that it does name.
    """
    path = folder / CARD_NAME
    if not path.is_file() or not is_repo_folder(folder):
        return None
    text = path.read_text(encoding="utf-8")
    results, size = read_results(folder), (folder / WEIGHTS_NAME).stat().st_size
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    places = re.findall(r'"local-dir:([^"]+)"', text)  # the folder may have been renamed since
    for name in {None, repo_id, *re.findall(r"hf-hub:([\w.-]+/[\w.-]+)", text)}:
        for place in {*places, folder.resolve().name, (name or "").rpartition("/")[2] or results["checkpoint"]}:
            if render_card(results, config, size, name, place, ours=False) == text:
                return None
    return text


def push_repo(
    folder: Path,
    repo_id: str,
    replace: bool = False,
    private: bool = False,
    place: str | None = None,
    ours: bool = False,
    said: str = "",
) -> list[str]:
    """Uploads what differs in one commit; the folder stays as it is.

    Args:
        folder: The folder of a checkpoint.
        repo_id: ``<owner>/<repo>``, which is made if need be. The card that is uploaded names it, unless it was edited,
            see `edited_card`: then it is uploaded as it is.
        replace: Whether other weights on the Hub may be replaced.
        private: Whether a repo that is made is private.
        place: The folder that the card should name; None for the name of the repo.
        ours: Whether it is a checkpoint of this package.
        said: A paragraph on its recipe, for the card.

    Returns:
        The names of the files that were uploaded.

    Raises:
        ValueError: If the files of the folder do not belong together.
        PushError: If it fails.
    """
    results, weights = read_results(folder), folder / WEIGHTS_NAME
    check_weights(weights, results, "publish the run again")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    _check_onnx(folder)
    files: dict[str, Path | bytes] = {name: folder / name for name in REPO_FILES if (folder / name).is_file()}
    # The card names the repo that it is in, which need not be the one that the local card names.
    texts = repo_texts(
        results, config, weights.stat().st_size, repo_id, place or repo_id.rpartition("/")[2], ours, said
    )
    edited = None if ours else edited_card(folder, repo_id)
    files[CARD_NAME] = (edited or texts[CARD_NAME]).encode()
    return push(files, repo_id, f"Publish {results['checkpoint']}", replace, private)


def _check_onnx(folder: Path) -> None:
    """Raises ValueError if there is an ONNX file that was not made of these weights, with these classes, in float32."""
    from ..export.onnx_file import OnnxFile

    path = folder / ONNX_NAME
    if not path.is_file():
        return
    try:
        found = OnnxFile(path).metadata
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path} cannot be compared with the weights: {error}") from error
    expected = metadata(_network_in(folder))
    if wrong := [key for key in ("weights_sha256", "classes", "quantized") if found.get(key) != expected.get(key)]:
        raise ValueError(
            f"{path} was not made of the checkpoint beside it, its {' and '.join(wrong)} differ; remove it, or write "
            "it anew with --onnx"
        )


def _way_to_results(run: Path) -> str:
    """How a run without results comes to have them."""
    if (run / REPORT_NAME).is_file():
        return (
            "the network was fine-tuned without test images, and a card has a test error: fine-tune it into a new "
            "folder with some, by --test 0.15 or a folder test"
        )
    if (run / SETTINGS_NAME).is_file():
        return "the fine-tuning has not ended; give its eqzoo finetune command again"
    return f"if it is a run of training/train.py and not of eqzoo finetune, run python training/evaluate.py {run} first"


def _way_to_new_results(run: Path) -> str:
    """How a run whose results are wrong comes to have others."""
    if (run / SETTINGS_NAME).is_file():
        return "give its eqzoo finetune command again"
    return f"run python training/evaluate.py {run} again"
