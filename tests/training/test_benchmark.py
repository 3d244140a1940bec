"""The benchmark: its baseline computes the same, and it prints what it measured."""

import json

import pytest
import torch

from eqzoo import layers
from eqzoo.groups import P4, P4M, Z2, cyclic
from eqzoo.ops import use_backend
from tests.training.in_process import run_script  # which makes the scripts importable

import benchmark_cases  # isort: skip

CASES = [
    (layers.E4Layer2d, P4, (4, 4), {"kernel_size": 5}),
    (layers.AffineSelfConv2d, P4, (4,), {"num_heads": 2, "kernel_size": 3}),
    (layers.SimpleAffineSelfConv2d, P4M, (4,), {"num_heads": 2, "kernel_size": 3}),
    (layers.StandAloneSelfAttention2d, Z2, (4,), {"num_heads": 2}),
    (layers.AttentiveGroupConv2d, P4, (3, 2, 3), {"padding": 1, "attention_size": 3}),
    (layers.AttentiveGroupConv2d, P4, (3, 2, 3), {"attention": "channel"}),
    (layers.AttentiveGroupConv2d, P4, (3, 2, 3), {"attention": "spatial", "attention_size": 3}),
    (layers.GroupSelfAttention2d, P4, (6, 6, 3), {"num_heads": 2}),
    (layers.GroupSelfAttention2d, cyclic(8), (6, 6, 3), {"num_heads": 2}),
]


@pytest.mark.parametrize(
    ("layer", "group", "sizes", "options"), CASES, ids=lambda case: getattr(case, "__name__", None)
)
def test_the_reference_gives_the_same_numbers_and_stores_more(layer, group, sizes, options):
    module = layer(group, *sizes, **options).eval()
    x = torch.randn(2, sizes[0], group.order, 6, 5)
    expected, kept = run(module, x)
    with use_backend("reference"):
        found, stored = run(module, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert stored > kept  # the two are not one implementation


def run(module, x):
    """The output, and how many numbers autograd keeps for its gradient."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
        y = module(x)
    return y.detach(), sum(sizes)


def test_every_case_has_a_name_of_its_own():
    suites = ("LAYERS", "MODELS", "LAYOUTS", "FILES", "TRANSFORMERS", "MEMORY", "COMPILED")
    suites += ("GROUP_CONVOLUTION", "GROUP_CONVOLUTION_NETWORKS", "TWINS")
    for cases in (getattr(benchmark_cases, suite) for suite in suites):
        assert len({case.key for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("suite", "options"),
    [
        ("layers", ["--only", "E4Layer2d(p4, 16, 16, 5) at 28 : GroupConv2d"]),
        ("layers", ["--only", "AffineSelfConv2d(p4, 16) at 16 : Group", "--dtype", "bfloat16", "--channels-last"]),
        ("models", ["--only", "p4_cnn : plain"]),
        ("layouts", ["--only", "p4_cnn,", "--dtype", "bfloat16"]),
        ("files", ["--only", "p4_cnn as a file, batch 1 "]),
        pytest.param("memory", ["--only", "p4_e4net : p4_cnn_w19"], marks=pytest.mark.slow),
        ("group_convolution", ["--only", "p4, 64, 64, 1"]),
        pytest.param("group_convolution_networks", ["--only", "p4_asc_resnet29"], marks=pytest.mark.slow),
        ("twins", ["--only", "p4_cnn"]),
    ],
)
def test_a_suite_writes_what_it_measured(tmp_path, suite, options):
    sizes = ["--batch-size", "2", "--rounds", "2"]
    ran = run_script("benchmark", suite, *options, *sizes, "--device", "cpu", "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    stem = f"{suite}_cpu" + "_bfloat16" * ("bfloat16" in options)
    report = json.loads((tmp_path / f"{stem}.json").read_text())
    assert ran.stdout == (tmp_path / f"{stem}.md").read_text()
    for row in report["rows"]:
        assert row["ratio"] > 0
        assert f"| {row['subject']} | {row['against']} |" in ran.stdout
    assert {"machine", "threads", "versions", "dtype"} <= set(report)
    assert f"{report['machine']}{report['instructions'] and ' with '}{report['instructions']}, 1 thread" in ran.stdout


@pytest.mark.slow
def test_group_convolutions_of_all_networks_are_found():
    shapes = benchmark_cases.registered_shapes()
    assert shapes[P4, 8, 8, 3, 1, 1, 1, 32, 32] == ["p4_resnet29", "p4_resnet83", "p4_se_resnet29", "p4_se_resnet83"]
    assert {group for group, *_ in shapes} == {P4, P4M}
    assert len(shapes) > 200


def test_an_unknown_case_is_refused():
    ran = run_script("benchmark", "models", "--only", "p5_cnn")
    assert ran.returncode == 1
    assert "no case of models has 'p5_cnn' in its name: p4_cnn : " in ran.stderr
