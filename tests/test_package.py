"""The wheel: it holds the weights and works away from the tree."""

import os
import subprocess
import sys
import zipfile

from tests.conftest import ROOT


def test_a_wheel_holds_the_weights_and_works_outside_the_tree(tmp_path):
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
    script = "import eqzoo, eqzoo_cli, sys; print(eqzoo.hub.shipped_folder()); eqzoo_cli.main(sys.argv[1:])"
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
