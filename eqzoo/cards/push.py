"""Cards beside weights, and the upload of a checkpoint's folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from .._common import write_json, write_text
from ..engine.run import LOG_NAME, TRAINING_NAME
from ..export.onnx_file import OnnxFile
from ..export.programs import export_onnx, metadata
from ..hub import CONFIG_NAME, RESULTS_NAME, WEIGHTS_NAME, push
from ..models.load import load_network
from .card import render_card
from .checkpoint import CARD_NAME, FIGURES, Checkpoint, check_name, read_checkpoint
from .figures import write_figures

ONNX_NAME = "model.onnx"
# Without predictions.csv and trained_on.npy, which tell of the user's images.
REPO_FILES = (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME, TRAINING_NAME, LOG_NAME, CARD_NAME, *FIGURES, ONNX_NAME)


def write_card(folder: Path) -> None:
    """Writes README.md from the other files of a checkpoint's folder."""
    write_text(folder / CARD_NAME, render_card(read_checkpoint(folder)))


def edited_card(folder: Path, checkpoint: Checkpoint) -> str | None:
    """The card of a folder if it is not the one that was rendered; None if it is, or without one."""
    path = folder / CARD_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # The repo that it was written for, if any, and one that the training started from may both be named.
    named = dict.fromkeys(re.findall(r"hf-hub:([\w.-]+/[\w.-]+)", text))
    return None if not text or any(text == render_card(checkpoint, each) for each in (None, *named)) else text


def restate(
    folder: Path,
    checkpoint: str | None = None,
    weights_license: str | None = None,
    base_model: str | None = None,
    label_names: Sequence[str] = (),
) -> None:
    """Changes what a folder says of its checkpoint: its name, license, start and, where they are numbers, its classes.

    Args:
        folder: The folder.
        checkpoint: Another name.
        weights_license: The license of the weights, as the Hub names it.
        base_model: The Hub repo of the weights that the network started from.
        label_names: Names of the classes, in the order of their numbers.

    Raises:
        ValueError: If the classes have names already, their number differs or two are equal: predictions would be
            mislabeled.
    """
    found = read_checkpoint(folder)
    edited = edited_card(folder, found)
    results, config = dict(found.results), dict(found.config)
    if checkpoint:
        check_name(checkpoint)
        results["checkpoint"] = checkpoint
    if base_model:
        results["base_model"] = base_model
    if weights_license:
        config["pretrained_cfg"] = dict(config["pretrained_cfg"]) | {"license": weights_license}
    if label_names:
        rows = results["classes"]
        numbered = all(str(row["name"]).isdecimal() for row in rows)
        if not numbered or len(rows) != len(label_names) or len({*label_names}) < len(rows):
            raise ValueError(
                f"{len(label_names)} names for {len(rows)} classes, {rows[0]['name']!r} and others: names are given "
                "to numbered classes, each its own"
            )
        names = dict(zip(sorted((row["name"] for row in rows), key=int), label_names, strict=True))
        results["classes"] = [row | {"name": names[row["name"]]} for row in rows]
        config["label_names"] = [row["name"] for row in results["classes"]]
    write_json(folder / CONFIG_NAME, config)
    write_json(folder / RESULTS_NAME, results)
    if checkpoint or label_names:
        write_figures(folder)
    if edited is None:
        write_card(folder)


def export_beside(folder: Path) -> str:
    """Writes the deployed network beside its weights, as ONNX; the same weights give the same bytes.

    Returns:
        What was checked.

    Raises:
        ExportError: If the file is not that of the network; it is then not written.
        ImportError: If the packages that write ONNX are missing.
    """
    return str(export_onnx(load_network(f"local-dir:{folder}").network, folder / ONNX_NAME))


def push_folder(folder: Path, repo_id: str, replace: bool = False, private: bool = False) -> list[str]:
    """Uploads what differs in one commit; the folder stays as it is.

    Args:
        folder: The folder of a checkpoint.
        repo_id: ``<owner>/<repo>``, which is made if need be. The card that is uploaded names it, unless it was edited:
            then it is uploaded as it is.
        replace: Whether other weights on the Hub may be replaced.
        private: Whether a repo that is made is private.

    Returns:
        The names of the files that were uploaded.

    Raises:
        ValueError: If the files of the folder do not belong together.
        PushError: If it fails.
    """
    checkpoint = read_checkpoint(folder)
    _check_onnx(folder)
    files: dict[str, Path | bytes] = {name: folder / name for name in REPO_FILES if (folder / name).is_file()}
    files[CARD_NAME] = (edited_card(folder, checkpoint) or render_card(checkpoint, repo_id)).encode()
    return push(files, repo_id, f"Publish {checkpoint.name}", replace, private)


def _check_onnx(folder: Path) -> None:
    """Raises ValueError if there is an ONNX file that was not made of these weights, with these classes, in float32."""
    path = folder / ONNX_NAME
    if not path.is_file():
        return
    found, expected = OnnxFile(path).metadata, metadata(load_network(f"local-dir:{folder}").network)
    if wrong := [key for key in ("weights_sha256", "classes", "quantized") if found.get(key) != expected.get(key)]:
        raise ValueError(
            f"{path} was not made of the checkpoint beside it, its {' and '.join(wrong)} differ; write it with --onnx"
        )
