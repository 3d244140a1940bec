"""What `eqzoo bench` times as compiled is compiled."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eqzoo.cli import bench
from eqzoo.cli.main import parser
from eqzoo.layers._layout import is_channels_last

SIZES, ROUNDS = [1, 2], 1
NAMES = list("abcde")  # times two sizes, more than dynamo's limit of 8 programs for one function


class Scaled(nn.Module):
    """Networks of one class: they share the code of ``forward``, as those of the zoo do."""

    input_size = (1, 2, 2)

    def __init__(self, name):
        super().__init__()
        self.factor = float(ord(name))

    def forward(self, x):
        return x * self.factor


@pytest.fixture
def compiled_calls(monkeypatch):
    """Counts the calls of compiled programs, of a backend that compiles nothing."""
    calls, compiler = [], torch.compile

    def backend(program, _):
        return lambda *args: calls.append(1) or program(*args)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiler(model, backend=backend, **options))
    monkeypatch.setattr(bench, "load_network", lambda name, **_: SimpleNamespace(network=Scaled(name)))
    yield calls
    torch._dynamo.reset()


def run(*options):
    words = ["bench", *NAMES, "--against", "a", "--rounds", str(ROUNDS), "--batch-sizes", *map(str, SIZES)]
    return bench.run(parser().parse_args([*words, "--device", "cpu", *options])).data


def test_every_network_is_timed_compiled(compiled_calls):
    data = run()
    warm_up = 1 + 2  # the first call, and the rounds that are not timed
    assert len(compiled_calls) == len(NAMES) * len(SIZES) * (warm_up + ROUNDS)
    assert sum(row["form"] == "compiled" for row in data["rows"]) == len(NAMES) * len(SIZES)
    assert not data["notes"]


def test_a_limit_that_is_hit_is_a_note(compiled_calls):
    with torch._dynamo.config.patch(recompile_limit=0):
        data = run()
    assert not compiled_calls
    assert {row["form"] for row in data["rows"]} == {"eager", "deployed"}
    assert data["notes"] == [f"{name} does not compile here: torch's limit of recompilations" for name in NAMES]


@pytest.mark.parametrize("channels", [1, 3])
def test_networks_are_timed_in_the_formats_that_are_asked_for(monkeypatch, channels):
    torch.set_default_dtype(torch.float32)
    seen = set()

    class Seen(Scaled):
        input_size = (channels, 4, 4)

        def forward(self, x):
            seen.add((is_channels_last(x), torch.nn.functional.conv2d(x, x.new_ones(1, channels, 1, 1)).dtype))
            return x

    monkeypatch.setattr(bench, "load_network", lambda name, **_: SimpleNamespace(network=Seen(name)))
    options = ["bench", "a", "--rounds", "1", "--batch-sizes", "2", "--no-compile", "--against", "b", "--device", "cpu"]
    answer = bench.run(parser().parse_args(options))
    assert seen == {(False, torch.float32)}
    assert ", float32, contiguous; " in answer.text
    seen.clear()
    answer = bench.run(parser().parse_args([*options, "--precision", "bfloat16", "--channels-last"]))
    assert seen == {(True, torch.bfloat16)}
    assert (answer.data["precision"], answer.data["channels_last"]) == ("bfloat16", True)
    assert ", bfloat16, channels last; " in answer.text


def test_networks_are_compiled_in_the_number_format_and_fused_in_float32(compiled_calls, monkeypatch):
    torch.set_default_dtype(torch.float32)
    fused, seen = [], set()
    monkeypatch.setattr(
        bench, "reparameterize_model", lambda model: fused.append(torch.is_autocast_enabled("cpu")) or model
    )

    class Seen(Scaled):
        def forward(self, x):
            seen.add(torch.is_autocast_enabled("cpu"))
            return x * self.factor

    monkeypatch.setattr(bench, "load_network", lambda name, **_: SimpleNamespace(network=Seen(name)))
    assert run("--precision", "bfloat16", "--channels-last")["notes"] == [
        "Compiled for one image, networks of this package do not use channels last."
    ]
    assert compiled_calls
    assert (set(fused), seen) == ({False}, {True})
