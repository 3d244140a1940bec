"""The notebooks: they run from top to bottom, on a small slice."""

import json

import pytest
import torch
from PIL import Image

from eqzoo.data import load_splits
from tests.conftest import ROOT
from tests.docs import notebooks
from tests.smears import save_smears

pytest.importorskip("matplotlib")
pytest.importorskip("onnxruntime")
SMEARS = (1, 11, 12, 131)  # test, two in train, valid


def test_cells_from_smears_to_an_onnx_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    save_smears(tmp_path / "smears", SMEARS)
    notebook = json.loads((ROOT / "examples" / "cells.ipynb").read_text())
    found = notebooks.run(notebook, {"MICROGRAPHS": "smears", "EPOCHS": 1, "START": "p4_cnn", "SIDE": 28})
    assert found["check"].exact
    assert found["checked"].exact
    assert (tmp_path / "cells.onnx").is_file()
    assert (tmp_path / "cells" / "model.safetensors").is_file()
    shown = [output["output_type"] for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert shown.count("display_data") == 5


@pytest.mark.slow
def test_cells_of_other_slides_with_other_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    save_smears(tmp_path / "smears", SMEARS)
    names = {"train": "train", "valid": "val", "test": "test"}
    for part, split in load_splits("chula_rbc12", tmp_path / "smears").items():
        for number, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
            folder = tmp_path / "crops" / names[part] / ("round", "other")[label > 4]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    notebook = json.loads((ROOT / "examples" / "cells.ipynb").read_text())
    changed = {"MICROGRAPHS": "nowhere", "CROPS": "crops", "EPOCHS": 1, "START": "p4_cnn", "SIDE": 28}
    found = notebooks.run(notebook, changed)
    assert found["names"] == ("other", "round")
    assert found["check"].exact
    assert found["checked"].exact


def test_a_cell_that_fails_is_named():
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["A = 1\n", "A / 0"]}
    with pytest.raises(AssertionError, match="cell 1: ZeroDivisionError"):
        notebooks.run({"cells": [cell]}, {})
    with pytest.raises(AssertionError, match="the parameters are"):
        notebooks.run({"cells": [cell | {"source": ["A = 1"]}]}, {"B": 2})
