"""Norms taken together with the sum and the ReLU behind them: the same numbers, and modules with hooks run alone."""

import pytest
import torch
from torch import nn

from eqzoo import create_model
from eqzoo.equivariance import randomize_norms
from eqzoo.groups import P4
from eqzoo.layers import GroupBatchNorm2d, GroupConv2d
from eqzoo.layers._fused import FusedSequential, norm_act


def layers():
    norms = GroupBatchNorm2d(P4, 3), GroupBatchNorm2d(P4, 3)
    for norm in norms:
        randomize_norms(norm, torch.Generator().manual_seed(0), torch.randn(4, 3, 4, 5, 5))
    return [GroupConv2d(P4, 3, 3, 3, padding=1), norms[0], nn.ReLU(), GroupConv2d(P4, 3, 3, 1), norms[1], nn.Identity()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("act", [None, nn.ReLU(), nn.Tanh()], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_a_fused_sequence_gives_what_the_plain_one_gives(training, count, act, with_residual):
    modules, x = layers()[:count], torch.randn(2, 3, 4, 5, 5)
    plain, fused = nn.Sequential(*modules).train(training), FusedSequential(*modules).train(training)
    assert list(plain.state_dict()) == list(fused.state_dict())
    residual = torch.randn(2, 3, 4, 5, 5) if with_residual else None
    y = plain(x)
    y = y if residual is None else y + residual
    torch.testing.assert_close(fused(x, residual, act), y if act is None else act(y), rtol=1e-12, atol=1e-12)


def test_sums_and_relus_of_the_networks_are_part_of_their_norms():
    for name in ("p4_resnet29", "p4_resnet18", "p4_cnn", "p4_allcnn", "p4m_resnet44", "p4_densenet"):
        model = create_model(name)
        x = torch.randn(2, *model.input_size)
        with torch.profiler.profile() as profile:
            model(x)
        relus = sum(type(module) is nn.ReLU for module in model.modules())
        left = sum(event.name in ("aten::relu", "aten::relu_") for event in profile.events())
        assert relus > 5
        assert left <= 2, name


@pytest.mark.parametrize("hooked", ["norm", "act"])
def test_who_looks_at_a_module_sees_what_it_gives(hooked):
    norm, act = layers()[1:3]
    net, seen = FusedSequential(norm, act), []
    {"norm": norm, "act": act}[hooked].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    x = torch.randn(2, 3, 4, 5, 5)
    y = net(x)
    ((given, out),) = seen
    assert (given is x) == (hooked == "norm")
    assert (out.min() < 0) == (hooked == "norm")
    torch.testing.assert_close(y, act(norm(x)))


def test_an_identity_at_the_end_is_seen_as_well():
    net, seen = FusedSequential(*layers()[1:3], nn.Identity()), []
    net[2].register_forward_hook(lambda module, args, out: seen.append(out))
    y = net(torch.randn(2, 3, 4, 5, 5))
    assert seen[0] is y


def test_other_norms_and_activations_run_one_after_the_other():
    x = torch.randn(2, 3, 4, 5, 5)
    norm, plain = layers()[1], nn.BatchNorm3d(3)
    torch.testing.assert_close(norm_act(norm, nn.Tanh(), x), norm(x).tanh())
    torch.testing.assert_close(norm_act(plain, nn.ReLU(), x, x), (plain(x) + x).relu())
    leaky = nn.LeakyReLU(0.5)
    torch.testing.assert_close(FusedSequential(norm, leaky)(x), leaky(norm(x)))


def test_a_norm_whose_forward_is_the_users_own_is_called_as_it_is():
    class Doubled(GroupBatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    x, patched = torch.randn(2, 3, 4, 5, 5), GroupBatchNorm2d(P4, 3).eval()
    patched.forward = lambda x, forward=patched.forward: 2 * forward(x)  # as profilers do
    for norm in (Doubled(P4, 3).eval(), patched):
        assert torch.equal(FusedSequential(norm, nn.ReLU())(x), norm(x).clamp_min(0))
        assert torch.equal(norm_act(norm, nn.ReLU(), x, residual=x), (norm(x) + x).clamp_min(0))
