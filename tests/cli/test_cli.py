"""The command line, as a user runs it."""

import csv
import dataclasses
import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import eqzoo
from eqzoo.analysis.sizes import weightless
from eqzoo.cli import Answer
from eqzoo.cli import main as command_line
from eqzoo.cli._answer import table
from eqzoo.cli._images import NamedImage
from eqzoo.cli.arguments import COMMANDS
from eqzoo.evaluation.predictor import Predictor
from eqzoo.layers._layout import is_channels_last
from eqzoo.models.load import LoadedNetwork, resolve
from tests import forks
from tests.cli.commands import IMAGE, run
from tests.conftest import ROOT


def changes(out):
    last = out.strip().splitlines()[-1]
    assert last.startswith("largest change of a probability")
    return [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", last)]


def test_predict_shows_an_invariant_network_and_one_that_is_not(capsys):
    code, out, _ = run(capsys, "predict", IMAGE)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["p4_cnn.rotmnist", "z2_cnn.rotmnist"]
    answers = [re.findall(r"(\d)  +([\d.]+) %", line) for line in lines[1:5]]
    assert {row[0] for row in answers} == {answers[0][0]}
    assert answers[0][0][0] == "7"
    p4, z2 = changes(out)
    assert p4 < 1e-12
    assert z2 > 1e-2
    assert [line.split("  ")[0] for line in lines[1:5]] == ["as it is", *(f"rotated by {a}°" for a in (90, 180, 270))]


def test_the_table_of_networks(capsys):
    code, out, _ = run(capsys, "list", "p4*_cnn*", "--long", "--parameters")
    assert code == 0
    heading, *rows = (re.split(r"  +", line) for line in out.splitlines())
    assert heading == ["name", "group", "parameters", "input", "family", "checkpoints"]
    assert ["p4_cnn", "p4", "24,610", "1 x 28 x 28", "G-CNN", "rotmnist"] in rows
    rows = run(capsys, "list", "z2_allcnn", "--long", "--parameters")[1].splitlines()
    assert re.split(r"  +", rows[1])[:5] == ["z2_allcnn", "z2", "1,370,996", "3 x 32 x 32", "attentive"]
    _, out, _ = run(capsys, "list", "p4_cnn.*", "--json", "--pretrained")
    (entry,) = json.loads(out)["networks"]
    assert entry["license"] == "mit"
    assert (entry["name"], entry["input_size"], entry["checkpoints"]) == ("p4_cnn.rotmnist", [1, 28, 28], ["rotmnist"])
    assert (entry["accuracy"], entry["distilled"]) == (98.04, False)


def test_the_table_of_checkpoints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower ones wrap its last column
    _, out, _ = run(capsys, "list", "p4_asc_resnet29.*", "--long", "--pretrained")
    heading, *rows = (re.split(r"  +", line) for line in out.splitlines())
    assert heading == ["name", "group", "input", "family", "license", "test error"]
    assert ["p4_asc_resnet29.cifar10", "p4", "3 x 32 x 32", "ASC", "mit", "6.07 ± 0.13 % (distilled)"] in rows
    assert ["p4_asc_resnet29.rotmnist", "p4", "1 x 28 x 28", "ASC", "mit", "2.17 %"] in rows


def test_a_checkpoint_without_license_is_listed(capsys, monkeypatch):
    cfg = dataclasses.replace(timm.get_pretrained_cfg("p4_cnn.rotmnist"), license=None)
    monkeypatch.setattr("eqzoo.cli.list.timm.get_pretrained_cfg", lambda name: cfg)
    code, out, _ = run(capsys, "list", "p4_cnn.*", "--long", "--pretrained")
    assert code == 0
    assert "mit" not in out


def test_results_are_known_without_the_weights(capsys, tmp_path, monkeypatch):
    """As in an installed package, which has the cards of large networks without their weights."""
    name = "p4_e4_resnet18.cifar10"
    (tmp_path / name).mkdir()
    for file in ("config.json", "results.json"):
        shutil.copy(ROOT / "model_cards" / name / file, tmp_path / name)
    for module in ("hub", "cli._networks"):
        monkeypatch.setattr(f"eqzoo.{module}.shipped_folder", lambda: tmp_path)
    _, out, _ = run(capsys, "list", name, "--json", "--pretrained")
    (entry,) = json.loads(out)["networks"]
    assert entry["accuracy"] == 92.92
    _, out, _ = run(capsys, "info", name, "--json")
    (entry,) = json.loads(out)["checkpoints"]
    assert entry["results"]["accuracy"] == 92.92
    assert entry["where"] == f"https://huggingface.co/eqzoo/{name}"


def test_tables_fit_the_terminal_and_break_no_word(monkeypatch):
    rows = [["name", "what it is"], ["p4_cnn", "a network that is equivariant by construction"]]
    assert max(map(len, table(rows, flexible=1).splitlines())) > 40  # in a pipe lines stay whole
    monkeypatch.setenv("COLUMNS", "30")
    narrow = table(rows, flexible=1)
    assert max(map(len, narrow.splitlines())) <= 30
    assert "equivariant" in narrow
    assert narrow.split() == [word for row in rows for cell in row for word in cell.split()]


def test_help_imports_neither_torch_nor_timm():
    """Which take seconds: help has to answer at once."""
    script = """
import sys; sys.argv[0] = 'eqzoo'; from eqzoo.cli import main as command_line
from eqzoo.cli.arguments import COMMANDS
for args in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
    try:
        assert command_line.main(args) == 0
    except SystemExit as done:
        assert done.code == 0
heavy = {"torch", "timm", "torchvision", "numpy", "huggingface_hub"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import numpy
assert heavy & set(sys.modules)  # the check above can fail
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"eqzoo {eqzoo.__version__}\n" in ran.stdout
    assert ran.stdout.count("--json") >= len(COMMANDS)
    assert "exit codes" in ran.stdout


def test_info_of_a_checkpoint_has_its_results(capsys):
    code, out, _ = run(capsys, "info", "p4_cnn.rotmnist")
    assert code == 0
    for words in (
        "24,610",
        "11,673,760",
        "28, 30, 32",
        "1.96 %",
        "2.048 ± 0.045 %",
        "Cohen and Welling",
        "blocks.4",
        "safetensors",
    ):
        assert words in " ".join(out.split())  # however narrow the terminal is
    assert "distilled" not in out
    _, out, _ = run(capsys, "info", "p4_asc_resnet29.cifar10")
    assert "% (distilled)" in " ".join(out.split())
    _, out, _ = run(capsys, "info", "p4_cnn.rotmnist", "--json", "--layers")
    data = json.loads(out)
    assert data["sides"]["exact"] == [28, 30, 32, 34, 36]
    assert data["multiply_adds"] == eqzoo.multiply_adds(eqzoo.create_model("p4_cnn"))
    assert data["checkpoints"][0]["results"]["accuracy"] == 98.04
    assert {"name": "stem.conv", "type": "LiftingConv2d", "output": [10, 4, 26, 26], "parameters": 90} in data["layers"]


def test_info_calls_a_folder_without_results_by_its_name(capsys, tmp_path):
    """Timm writes the tag of the checkpoint that the network started from."""
    model = eqzoo.create_model("p4_cnn", pretrained=True, num_classes=3)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]["tag"] == "rotmnist"
    data = json.loads(run(capsys, "info", tmp_path, "--json")[1])
    assert [row["name"] for row in data["checkpoints"]] == [str(tmp_path)]
    assert (data["checkpoints"][0]["results"], data["num_classes"]) == (None, 3)
    (tmp_path / "results.json").write_text("{}")
    assert json.loads(run(capsys, "info", tmp_path, "--json")[1])["checkpoints"][0]["name"] == str(tmp_path)
    (tmp_path / "results.json").write_text('{"checkpoint": "p4_cnn.galaxies"}')
    assert json.loads(run(capsys, "info", tmp_path, "--json")[1])["checkpoints"][0]["name"] == "p4_cnn.galaxies"
    file = (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")  # not that of the results
    assert json.loads(run(capsys, "info", file, "--json")[1])["checkpoints"][0]["name"] == str(file)


def test_sizes_that_info_calls_exact_are_those_that_the_network_takes(capsys):
    data = json.loads(run(capsys, "info", "p4m_e4net", "--json")[1])
    model = eqzoo.create_model("p4m_e4net")
    untrained = json.loads(run(capsys, "info", "z2m_gsanet_b", "--json")[1])
    assert untrained["checkpoints"][0]["where"] is None
    for side in (24, 26):
        taken = True
        try:
            model(torch.zeros(1, 1, side, side))
        except ValueError:
            taken = False
        assert taken == (side in data["sides"]["exact"])


def test_attention_writes_a_figure_and_its_numbers(capsys, tmp_path):
    figure = tmp_path / "out.png"
    code, out, _ = run(capsys, "attention", "p4_alpha_f_cnn", IMAGE, figure, "--untrained", "--dpi", 50)
    assert code == 0
    assert "blocks.0.conv (2 of 7 with attention)" in out
    assert Image.open(figure).width > 300
    code, out, _ = run(
        capsys, "attention", "r4_gsanet_t", IMAGE, tmp_path / "out.svg", "--untrained", "--json", "--group", "r2",
        "--place", 3, 4, "--head", 1,
    )  # fmt: skip
    data = json.loads(out)
    assert code == 0
    assert len(data["maps"]) == len(data["copies"]) == 2
    assert data["equivariance_error"] < 1e-10
    assert data["layer"] == data["layers"][0]
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_attention_reads_the_weights_it_is_given(capsys, tmp_path):
    from safetensors.torch import save_file

    save_file(eqzoo.create_model("p4_alpha_rh_cnn").float().state_dict(), tmp_path / "mine.safetensors")
    args = ("p4_alpha_rh_cnn", IMAGE, tmp_path / "out.png", "--json", "--dpi", 30)
    theirs = json.loads(run(capsys, "attention", *args, "--untrained")[1])
    code, out, _ = run(capsys, "attention", *args, "--checkpoint", tmp_path / "mine.safetensors")
    assert code == 0
    assert json.loads(out)["maps"] != theirs["maps"]


def test_bench_times_a_network_and_its_plain_twin(capsys):
    args = ("p4_cnn", "--rounds", 1, "--batch-sizes", 1, 2, "--no-compile")
    code, out, _ = run(capsys, "bench", *args)
    assert code == 0
    assert re.search(r"p4_cnn +deployed +2 .* x z2_cnn", out)
    rows = json.loads(run(capsys, "bench", *args, "--json")[1])["rows"]
    assert {(row["network"], row["form"], row["batch"]) for row in rows} == {
        (name, form, batch) for name in ("p4_cnn", "z2_cnn") for form in ("eager", "deployed") for batch in (1, 2)
    }
    for row in rows:
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["seconds"])
        assert (row["ratio"] is None) == (row["network"] == "z2_cnn")


def test_bench_on_other_images(capsys):
    options = ("--rounds", 1, "--batch-sizes", 1, "--no-compile", "--json")
    cases = {("p4_cnn", "--size", 30): {(1, 30, 30)}, ("z2_cnn", "z2_resnet29"): {(1, 28, 28), (3, 32, 32)}}
    for names, sizes in cases.items():
        rows = json.loads(run(capsys, "bench", *names, *options)[1])["rows"]
        assert {tuple(row["image"]) for row in rows} == sizes


def test_every_error_path_says_what_to_do_in_one_line(capsys, tmp_path):
    attention = ("attention", "z2m_gsanet_b", IMAGE)
    for args, message in (
        (("info", "p5_cnn"), "p5_cnn"),
        (("predict", tmp_path / "none.png"), "none.png"),
        (("predict", IMAGE, "--model", "z2m_gsanet_b"), "z2m_gsanet_b"),
        (("list", "q*"), "q*"),
        ((*attention, tmp_path / "out.png"), "no weights for z2m_gsanet_b"),
        ((*attention, tmp_path / "out.docx", "--untrained"), "docx"),
        ((*attention, tmp_path / "none" / "out.png", "--untrained"), "none"),
        ((*attention, tmp_path / "out.png", "--untrained", "--place", 40, 1), "out of bounds"),
        (("bench", "p4_cnn", "--device", "abacus"), "abacus"),
        (("bench", "p4_cnn", "--size", 29), "29 x 29"),
        (("evaluate", "p4_cnn", "x", "--csv", "--json"), "--json"),
        (("evaluate", "p4_cnn", "x", "--csv", "--rotated", 5), "--rotated"),
        (("export", "p4_cnn", tmp_path / "net.pt2", "--opset", 18), "--opset"),
        (
            ("convert", "att_gconvs", tmp_path / "x.pth", "--model", "p4_cnn", "--output", tmp_path / "y.safetensors"),
            "x.pth",
        ),
    ):
        code, out, err = run(capsys, *args)
        assert code == 2, args
        assert message in err, args
        assert not out
        assert next(line for line in err.splitlines() if not line.endswith("...")).startswith(f"eqzoo {args[0]}: ")
        assert "Traceback" not in err
    assert not list(tmp_path.iterdir())  # nothing is written by halves


def test_what_is_no_command_is_refused_with_usage(capsys):
    attention = ("attention", "p4_cnn", IMAGE, "out.png")
    for args in (
        ("frobnicate",),
        ("bench", "p4_cnn", "--rounds", 0),
        ("check", "p4_cnn", "--size", -3),
        (*attention, "--dpi", 0),
        (*attention, "--untrained", "--checkpoint", "x"),
        ("predict", ""),
        ("predict", "x.png", "--model", ""),
        ("finetune", "p4_cnn", ""),
    ):
        code, _, err = run(capsys, *args)
        assert code == 2
        assert "usage: eqzoo" in err
        assert ("argument is empty" in err) == ("" in args)


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (RuntimeError("two\nlines"), 3), (ImportError("x"), 2), (OSError("x"), 2)],
)
def test_exit_codes_of_what_goes_wrong(capsys, monkeypatch, raised, code):
    def run_instead(args):
        raise raised

    monkeypatch.setattr(importlib.import_module("eqzoo.cli.list"), "run", run_instead)
    found, out, err = run(capsys, "list")
    assert (found, out, err.count("\n")) == (code, "", 1)
    monkeypatch.setenv("EQZOO_TRACEBACK", "1")
    assert ("Traceback" in run(capsys, "list")[2]) == (code != 130)


def test_inverted_images_keep_their_opacity():
    image = torch.zeros(4, 28, 28)
    image[3] = 255
    assert NamedImage("a.png", lambda channels: image).read(4, invert=True).eq(255).all()  # white, opaque as before
    of_array = NamedImage("a.npz[0]", lambda channels: image, opacity=False)  # a channel like others
    assert of_array.read(4, invert=True).mean((1, 2)).tolist() == [255, 255, 255, 0]
    assert of_array.read(4).mean((1, 2)).tolist() == [0, 0, 0, 255]


def print_completion():
    """A command that prints much."""
    sys.exit(command_line.main(["completion", "bash"]))


def print_to_a_reader_that_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")
    print_completion()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    process = forks.start(print_completion, out="/dev/full", err=tmp_path / "err")
    forks.wait(process)
    said = (tmp_path / "err").read_text()
    assert process.exitcode == 2
    assert said.count("\n") == 1
    assert "No space left" in said


def test_a_reader_that_has_gone_away_is_no_error():
    ran = forks.run(print_to_a_reader_that_has_gone)
    assert "BrokenPipe" not in ran.stderr
    assert "eqzoo" not in ran.stderr  # neither our own message nor a traceback
    assert ran.returncode == 141


def test_a_closed_output_leaves_the_exit_code_as_it_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert command_line.main(["list", "p4_cnn"]) == 0
    monkeypatch.setattr(sys, "stdout", None)
    assert command_line.main(["info", "no_such_network"]) == 2


def test_completion_knows_commands_options_and_names(capsys, tmp_path):
    for shell in ("bash", "zsh", "fish"):
        code, out, _ = run(capsys, "completion", shell)
        assert code == 0
        assert "p4_cnn.rotmnist" in out
        assert "untrained" in out
        (tmp_path / shell).write_text(out)
    script = f"""
source {tmp_path / "bash"}
for words in "eqzoo inf" "eqzoo info z2_allc" "eqzoo bench --no-c"; do
    COMP_WORDS=($words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
    _shtab_eqzoo; echo "${{COMPREPLY[@]}}"
done"""
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:3] == ["info", "z2_allcnn z2_allcnn.cifar10_aug", "--no-compile"]


def test_options_that_come_twice_are_added_up():
    def parse(line):
        return command_line.parser().parse_args(line.split())

    tuned = "finetune p4_cnn d --output o --set optimizer=adamw --set a=1 b=2 --freeze stem --freeze blocks.0 blocks.1"
    args = parse(tuned)
    assert args.set == ["optimizer=adamw", "a=1", "b=2"]
    assert args.freeze == ["stem", "blocks.0", "blocks.1"]
    assert parse("predict x.png --model a --model b").model == ["a", "b"]
    assert parse("bench a --batch-sizes 1 --batch-sizes 2 3").batch_sizes == [1, 2, 3]
    assert parse("finetune p4_cnn d --output o").set == []  # the default is not the list of another call


def test_a_setting_in_two_ways_is_refused(capsys, tmp_path):
    tuned = ("finetune", "p4_cnn", tmp_path, "--output", tmp_path / "out")
    for args, message in (
        (("--lr", 0.1, "--set", "lr=0.2"), "lr is given by an option of its own and by --set"),
        (("--set", "lr=0.1", "lr=0.2"), "lr comes twice"),
        (("--size", 0), "at least 1, got 0"),
    ):
        code, out, err = run(capsys, *tuned, *args)
        assert (code, out) == (2, "")
        assert message in err


def test_weights_that_are_not_finite_predict_and_attend_to_nothing(capsys, tmp_path, monkeypatch):
    network = eqzoo.create_model("p4_alpha_rh_cnn").eval()
    network.stem.conv.attention.spatial.data[:] = math.nan
    for name, loader, found in (
        ("predict", "load_predictor", Predictor(network, "p4_alpha_rh_cnn", "p4_alpha_rh_cnn")),
        ("attention", "load_network", LoadedNetwork(network, resolve("p4_alpha_rh_cnn"), trained=True)),
    ):
        module = importlib.import_module(f"eqzoo.cli.{name}")
        monkeypatch.setattr(module, loader, lambda *_, found=found, **__: found)
    for args in (("predict", IMAGE), ("attention", "p4_alpha_rh_cnn", IMAGE, tmp_path / "out.png")):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert "is not finite" in err


def test_json_is_strict(capsys, monkeypatch):
    monkeypatch.setattr(importlib.import_module("eqzoo.cli.list"), "run", lambda args: Answer("", {"x": math.nan}))
    code, out, err = run(capsys, "list", "--json")
    assert (code, out) == (2, "")
    assert "not JSON compliant" in err


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_an_output_that_is_not_utf_8_gets_what_it_can_show(monkeypatch, option):
    answer = Answer("error ± ‖x‖", {"said": "error ± ‖x‖"})
    monkeypatch.setattr(importlib.import_module("eqzoo.cli.list"), "run", lambda args: answer)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command_line.main(["list", *option]) == 0
    said = terminal.buffer.getvalue().decode("cp1252")
    if option:
        assert json.loads(said) == answer.data
    else:
        assert said == "error ± ?x?\n"


def test_names_of_files_that_are_no_text_are_kept(monkeypatch):
    bytes_of = [os.fsdecode(b"caf\xe8.png"), os.fsdecode(b"caf\xe9.png"), "é"]
    for names, option in ((bytes_of, []), (bytes_of, ["--json"]), (["é"], ["--json"])):
        answer = Answer("\n".join(names), {"files": names})
        monkeypatch.setattr(importlib.import_module("eqzoo.cli.list"), "run", lambda args, answer=answer: answer)
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", terminal)
        assert command_line.main(["list", *option]) == 0
        said = terminal.buffer.getvalue()
        found = json.loads(said)["files"] if option else os.fsdecode(said).splitlines()
        assert found == names
    assert "é".encode() in said  # JSON is in ASCII only where it has to be


@pytest.fixture
def digits_folder(tmp_path):
    """A folder with images in two formats, one of them in a folder of its own, and a text file."""
    (tmp_path / "more").mkdir()
    seven = Image.open(IMAGE)
    seven.save(tmp_path / "b.png")
    seven.resize((56, 56)).convert("RGB").save(tmp_path / "more" / "c.jpg")
    Image.open(IMAGE.with_name("four.png")).save(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_predict_has_a_line_for_each_of_several_images(capsys, digits_folder, monkeypatch):
    monkeypatch.setattr(importlib.import_module("eqzoo.cli.predict"), "_BATCH_SIZE", 2)
    code, out, _ = run(capsys, "predict", digits_folder, IMAGE, "--model", "p4_cnn", "--model", "z2_cnn")
    assert code == 0
    heading, *lines = (re.split(r"  +", line) for line in out.splitlines())
    assert heading == ["file", "p4_cnn.rotmnist", "probability", "z2_cnn.rotmnist", "probability"]
    expected = [digits_folder / "a.png", digits_folder / "b.png", digits_folder / "more" / "c.jpg", IMAGE]
    assert [line[0] for line in lines] == [str(path) for path in expected]
    assert [line[1] for line in lines] == ["4", "7", "7", "7"]
    assert lines[1][1:] == lines[3][1:]
    alone = json.loads(run(capsys, "predict", IMAGE, "--json")[1])["networks"]
    found = json.loads(run(capsys, "predict", digits_folder, "--json")[1])
    assert [entry["image"] for entry in found] == [str(path) for path in expected[:3]]
    for network, other in zip(found[1]["networks"], alone, strict=True):
        assert (network["name"], network["label"]) == (other["name"], other["copies"][0]["label"])
        values, exact = list(network["probabilities"].values()), other["copies"][0]["probabilities"]
        assert values == pytest.approx(exact, abs=1e-3)  # of many images scaled pixels are rounded
        assert values != pytest.approx(exact, rel=1e-12, abs=0)
        assert network["probability"] == network["probabilities"][network["label"]]


def test_predict_takes_many_images_channels_last(digits_folder, monkeypatch):
    layouts = []
    network = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    network.stem.register_forward_pre_hook(lambda _, args: layouts.append(is_channels_last(args[0])))
    predictor = Predictor(network, "p4_cnn", "p4_cnn")
    monkeypatch.setattr(importlib.import_module("eqzoo.cli.predict"), "load_predictor", lambda *_: predictor)
    assert command_line.main(["predict", str(digits_folder), "--model", "p4_cnn"]) == 0
    assert layouts == [True]
    assert command_line.main(["predict", str(IMAGE), "--model", "p4_cnn"]) == 0
    assert layouts == [True, False]  # in float64


def test_predict_prints_comma_separated_values(capsys, digits_folder):
    code, out, _ = run(capsys, "predict", digits_folder, "--model", "p4_cnn", "z2_cnn", "--csv")
    assert code == 0
    found = list(csv.DictReader(out.splitlines()))
    expected = json.loads(run(capsys, "predict", digits_folder, "--json")[1])
    assert [row["file"] for row in found] == [entry["image"] for entry in expected]
    for row, entry in zip(found, expected, strict=True):
        for network in entry["networks"]:
            assert row[network["name"]] == network["label"]
            values = {label: float(row[f"{network['name']} {label}"]) for label in network["probabilities"]}
            assert values == network["probabilities"]
    _, out, _ = run(capsys, "predict", digits_folder, "--model", "p4_cnn", "p4_cnn", "--csv")
    heading = out.splitlines()[0].split(",")
    assert len(set(heading)) == len(heading) == 23
    assert heading[1] == "p4_cnn.rotmnist (1)"
    _, out, err = run(capsys, "predict", digits_folder, "--model", "p4_cnn", "--csv")
    assert out.splitlines()[0] == "file,prediction,0,1,2,3,4,5,6,7,8,9"
    assert err == ""
    _, alone, err = run(capsys, "predict", digits_folder / "a.png", "--csv", "--model", "p4_cnn")
    (one,), (first, *_) = (list(csv.DictReader(text.splitlines())) for text in (alone, out))
    assert one.keys() == first.keys()
    for column in "0123456789":  # sums may have another order in batches of another size
        assert float(one[column]) == pytest.approx(float(first[column]), rel=1e-4, abs=1e-12)
    assert (one["file"], one["prediction"]) == (first["file"], first["prediction"])
    assert run(capsys, "predict", digits_folder, "--csv", "--json")[0] == 2


def test_a_new_process_leaves_timms_models_alone_and_needs_no_packages_of_the_training(tmp_path):
    """As README's installation has it, without the extra train; matplotlib is imported where something is drawn."""
    (tmp_path / "7").mkdir()
    shutil.copy(IMAGE, tmp_path / "7")
    script = f"""
import sys, warnings
sys.modules["accelerate"] = None
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import timm
    entrypoints = {{name: timm.model_entrypoint(name) for name in timm.list_models()}}
    pretrained = set(timm.list_pretrained())
    import eqzoo
assert all(timm.model_entrypoint(name) is entry for name, entry in entrypoints.items())
assert set(timm.list_models()) - set(entrypoints) == {{*eqzoo.list_models(), "orbitnet"}}
assert set(timm.list_pretrained()) - pretrained == set(eqzoo.list_pretrained())
assert "matplotlib" not in sys.modules
from eqzoo.cli.main import main
image, folder = {str(IMAGE)!r}, {str(tmp_path)!r}
for command in (["predict", image, "--model", "p4_cnn"], ["evaluate", "p4_cnn", folder], ["check", "p4_cnn"]):
    assert main(command) == 0, command
assert main(["publish", folder]) == 2  # there is nothing to publish, which it says
assert main(["finetune", "p4_cnn", folder, "--output", "out"]) == 2
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("eqzoo finetune: training needs accelerate")


def test_predict_tells_of_images_darker_than_those_of_the_training(capsys, tmp_path):
    """12-bit numbers in files of 16 bits; the digits' own mean is 0.13, that of land 0.36."""
    tile = Image.open(IMAGE.with_name("tile.jpg"))
    Image.fromarray(np.asarray(tile.convert("L")).astype(np.uint16) * 16).save(tmp_path / "dark.png")
    Image.new("L", tile.size).save(tmp_path / "black.png")
    tile.save(tmp_path / "tile.png")
    args = ("predict", tmp_path, "--model", "z2_resnet29.eurosat")
    assert f"1 of 3 images, such as {tmp_path / 'dark.png'}: much darker" in run(capsys, *args)[2]
    assert run(capsys, *args, "--invert")[2] == ""
    # Digits are dark in the mean, and bright somewhere.
    assert "darker" in run(capsys, "predict", tmp_path / "dark.png", "--model", "p4_cnn")[2]
    assert run(capsys, "predict", IMAGE, "--model", "p4_cnn")[2] == ""
    (tmp_path / "dark.png").unlink()
    assert run(capsys, *args)[2] == ""


def test_predict_without_a_readable_file_is_an_error(capsys, digits_folder):
    (digits_folder / "empty").mkdir()
    (digits_folder / "x").mkdir()
    (digits_folder / "x" / "d.png").write_text("no image")
    for args, message in (
        ((digits_folder / "x",), "d.png is not an image"),
        ((digits_folder / "none.png", digits_folder / "nor.png"), "2 of 2 images cannot be read and have no"),
        ((digits_folder / "empty",), "no image in the folder"),
    ):
        code, out, err = run(capsys, "predict", *args)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_predict_names_the_files_that_it_cannot_read_and_predicts_the_others(capsys, digits_folder, monkeypatch):
    monkeypatch.setattr(importlib.import_module("eqzoo.cli.predict"), "_BATCH_SIZE", 1)  # one without any image
    _, expected, _ = run(capsys, "predict", digits_folder, "--model", "p4_cnn", "z2_cnn", "--csv")
    (digits_folder / "aa.png").write_text("no image")
    missing = digits_folder / "no\nne.png"  # given twice, and its name has two lines
    args = ("predict", digits_folder, missing, missing, "--model", "p4_cnn", "z2_cnn")
    code, out, err = run(capsys, *args, "--csv")
    assert (code, out) == (2, expected)
    assert "2 of 5 images cannot be read and have no prediction; remove or replace them: " in err
    assert "aa.png is not an image" in err
    assert "No such file" in err
    assert err.count("\n") == 1
    code, out, _ = run(capsys, *args, "--json")
    *found, first, second = json.loads(out)
    assert code == 2
    assert [entry["image"].rpartition("/")[2] for entry in found] == ["a.png", "b.png", "c.jpg"]
    assert (first["networks"], second["networks"]) == ([], [])
    assert "is not an image" in first["error"]


@pytest.mark.parametrize("name", ["p4_asc_resnet29", "p4_alpha_cnn", "p4_e4net", "p4m_octic_vit_tiny_patch16_224"])
def test_info_has_every_layer_with_parameters(capsys, name):
    """Those too that are not called, but whose parameters another layer reads."""
    _, out, _ = run(capsys, "info", name, "--json", "--layers")
    names = [layer["name"] for layer in json.loads(out)["layers"]]
    model = weightless(name)
    wanted = {child for child, module in model.named_modules() if child and module._parameters}
    assert wanted <= {*names}
    assert len(names) == len({*names})
