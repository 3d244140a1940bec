"""`eqzoo export` and `eqzoo check`: what they print, and their exit codes."""

import json

import pytest

from eqzoo.cli import main as command_line


def test_the_commands_codes_and_json(capsys, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = str(tmp_path / "net.onnx")

    def run(*args):
        code = command_line.main(list(args))
        return code, *capsys.readouterr()

    code, out, _ = run("export", "p4_cnn", file)
    assert (code, "Conv 7" in out) == (0, True)
    assert run("check", file)[:1] == run("check", "p4_cnn")[:1] == (0,)
    code, out, _ = run("check", file, "--json", "--group", "p4m")
    assert (code, json.loads(out)["exact"]) == (1, False)
    code, out, _ = run("export", "p4_cnn", str(tmp_path / "net.pt2"), "--json")
    assert (code, json.loads(out)["metadata"]["group"]) == (0, "p4")
    for args, message in (
        (("check", "rsnet18"), "near it are resnet18"),
        (("check", "test_vit", "--size", "100"), "test_vit takes no images of 3 x 100 x 100 (channels, height, width)"),
        (("export", "p4m_e4net", file), "add --untrained"),
        (("export", "p4_cnn", "net.txt"), "ends in .onnx or .pt2"),
    ):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert message in err
