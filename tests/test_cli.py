"""The command line, as a user runs it."""

import re
import subprocess
import sys

import pytest
from PIL import Image

import eqzoo_cli
from tests.conftest import ROOT

PICTURE = ROOT / "examples" / "seven.png"


def run(capsys, *args):
    code = eqzoo_cli.main([str(arg) for arg in args])
    return code, *capsys.readouterr()


def changes(out):
    last = out.strip().splitlines()[-1]
    assert last.startswith("largest change of a probability")
    return [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", last)]


def test_predict_shows_a_network_that_keeps_its_answer_and_one_that_does_not(capsys):
    code, out, _ = run(capsys, "predict", PICTURE)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["p4_cnn.rotmnist", "z2_cnn.rotmnist"]
    answers = [re.findall(r"(\d)  +([\d.]+) %", line) for line in lines[1:5]]
    assert {row[0] for row in answers} == {answers[0][0]}
    assert answers[0][0][0] == "7"
    p4, z2 = changes(out)
    assert p4 < 1e-12
    assert z2 > 1e-2


@pytest.mark.parametrize("mode", ["RGB", "P"])
def test_predict_takes_any_picture(capsys, tmp_path, mode):
    Image.open(PICTURE).resize((61, 90)).convert(mode).save(tmp_path / "other.png")
    code, out, _ = run(capsys, "predict", tmp_path / "other.png", "--model", "p4_cnn", "--invert")
    assert code == 0
    assert changes(out)[0] < 1e-12


def test_errors_are_one_line_and_a_code(capsys, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    for args, message in (
        (("predict", tmp_path / "none.png"), "no picture at"),
        (("predict", tmp_path / "text.png"), "is not a picture"),
        (("predict", PICTURE, "--model", "p5_cnn"), "no network 'p5_cnn' here"),
        (("predict", PICTURE, "--model", "p4m_cnn"), "Three ways on"),
        (("list", "q*"), "nothing matches"),
    ):
        code, out, err = run(capsys, *args)
        assert code == 2
        assert not out
        assert message in err
        assert err.count("\n") == 1


def test_list(capsys):
    assert run(capsys, "list", "z2_cnn*")[1] == "z2_cnn\n"
    assert run(capsys, "list", "z2*", "--pretrained")[1] == "z2_cnn.rotmnist\n"


def test_help_imports_no_torch():
    script = """
import sys, eqzoo_cli
try:
    eqzoo_cli.main(["--help"])
except SystemExit:
    pass
assert not {"torch", "timm", "eqzoo"} & set(sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "predict" in ran.stdout
