"""The wheel: its contents, and that it works outside the repository."""

import os
import runpy
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT


def test_the_wheel_contains_the_weights_and_works_outside_the_repository(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("eqzoo-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "eqzoo/py.typed" in names
    assert "eqzoo/model_cards/p4_cnn.rotmnist/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests", "training"))]
    script = "import eqzoo, eqzoo.cli.main as c, sys; print(eqzoo.hub.shipped_folder()); c.main(sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", script, "predict", ROOT / "examples" / "seven.png"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[0] == str(site / "eqzoo" / "model_cards")
    assert "p4_cnn.rotmnist" in ran.stdout


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_large_weights_are_not_packaged(tmp_path, target):
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    for name, size in (("small", hook["WEIGHTS_LIMIT"]), ("large", hook["WEIGHTS_LIMIT"] + 1)):
        (tmp_path / "model_cards" / name).mkdir(parents=True)
        (tmp_path / "model_cards" / name / "model.safetensors").write_bytes(b"0" * size)
        (tmp_path / "model_cards" / name / ".model.safetensors.1.tmp").touch()
        (tmp_path / "model_cards" / name / "config.json").touch()
        (tmp_path / "model_cards" / name / "model.onnx").touch()
    data = {"force_include": {}}
    build = hook["CheckpointsHook"](str(tmp_path), {}, None, None, str(tmp_path), target)
    build.initialize("editable", data)
    assert data["force_include"] == {}
    build.initialize("standard", data)
    into = "eqzoo/model_cards" if target == "wheel" else "model_cards"
    assert set(data["force_include"].values()) == {
        f"{into}/small/model.safetensors",
        f"{into}/small/config.json",
        f"{into}/large/config.json",
    }


def test_checkpoints_in_git_are_small():
    sizes = {path: path.stat().st_size for path in (ROOT / "model_cards").glob("*/*")}
    assert max(sizes.values()) <= 16e6, max(sizes, key=sizes.get)
    assert sum(sizes.values()) <= 220e6
