"""The kernels' common ground: they are built once, chosen by backend, and replaced by eager torch where they fail."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import eqzoo
from eqzoo.groups import P4
from eqzoo.ops import (
    AffineBank,
    AffineBanks,
    _compile,
    _dispatch,
    affine_attention,
    attend_input,
    attentive_conv,
    batch_norm,
    generated_depthwise,
    group_conv2d,
    octic_gelu,
    octic_norm,
    stack_heads,
    use_backend,
)
from tests import forks

EXPONENTIAL = """
#include "simd.h"
extern "C" void exponential(const Scalar *x, Scalar *y, int64_t n, double scale, int64_t threads) {
    for (int64_t i = 0; i < n; i++) y[i] = fast_exp(static_cast<Scalar>(scale) * x[i]);
}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with a kernel of the test's own, and an empty cache."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "simd.h").write_text((_compile._SOURCES / "simd.h").read_text())
    (folder / "exponential.cpp").write_text(EXPONENTIAL)
    monkeypatch.setattr(_compile, "_SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EQZOO_NATIVE", raising=False)
    forget()
    yield folder
    forget()


def forget():
    """What a new process does not know."""
    for cached in (_compile._library, _compile._cache, _compile._compiler, _compile._temporary_folder):
        cached.cache_clear()


def exponential(x, scale=1.0):
    function = _compile.cpu_function("exponential", "exponential", x)
    if function is None:
        return None
    y = torch.empty_like(x)
    _compile.launch(function, x, y, x.numel(), scale)
    return y


@pytest.mark.parametrize(("dtype", "low", "bound"), [(torch.float32, -87, 2e-7), (torch.float64, -700, 4e-16)])
@pytest.mark.usefixtures("sources")
def test_the_exponential_is_exact_to_rounding(dtype, low, bound):
    x = torch.linspace(low, 20, 10001, dtype=dtype)
    assert ((exponential(x).double() / x.double().exp()) - 1).abs().max() < bound
    ends = torch.tensor([-float("inf"), float("nan"), -1e30, 0.0], dtype=dtype)
    assert torch.equal(exponential(ends).nan_to_num(7.0), torch.tensor([0.0, 7.0, 0.0, 1.0], dtype=dtype))


def test_a_kernel_is_built_once_and_again_when_its_source_changes(sources, tmp_path, capfd):
    x = torch.ones(3)
    assert exponential(x) is not None
    said = capfd.readouterr().err
    assert said.startswith("eqzoo: compiling exponential.cpp (double) for this processor, once (")
    assert said.count("\n") == 1
    (built,) = (tmp_path / "cache" / "eqzoo" / "kernels").glob("*.so")
    made = built.stat().st_mtime_ns
    _compile._library.cache_clear()
    assert exponential(x) is not None
    assert built.stat().st_mtime_ns == made
    assert capfd.readouterr().err == ""
    (sources / "exponential.cpp").write_text(EXPONENTIAL.replace("fast_exp(", "1 + fast_exp("))
    _compile._library.cache_clear()
    assert torch.allclose(exponential(x), 1 + x.exp())
    assert capfd.readouterr().err.count("compiling") == 1
    assert torch.allclose(exponential(x.float()), 1 + x.float().exp())  # each type is built at its first use
    assert "compiling exponential.cpp (float)" in capfd.readouterr().err


def test_what_cannot_be_built_is_said_once_and_left_to_torch(sources):
    (sources / "exponential.cpp").write_text("this is not C++")
    with pytest.warns(UserWarning, match=r"exponential\.cpp could not be built or loaded, eager torch is used"):
        assert exponential(torch.ones(3)) is None
    assert exponential(torch.ones(3)) is None


@pytest.mark.usefixtures("sources")
def test_without_a_compiler_or_on_request_torch_does_the_work(monkeypatch):
    with use_backend("eager"):
        assert exponential(torch.ones(3)) is None
    monkeypatch.setenv("EQZOO_NATIVE", "0")
    assert exponential(torch.ones(3)) is None
    monkeypatch.delenv("EQZOO_NATIVE")
    forget()
    monkeypatch.setenv("PATH", "")
    assert exponential(torch.ones(3)) is None


def train_without_kernels():
    model, x = eqzoo.create_model("p4_resnet29", num_classes=3).train(), torch.randn(2, 3, 32, 32)
    found = model(x)
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with use_backend("eager"):
        torch.testing.assert_close(found, model(x))
    assert _compile._library.cache_info().misses > 0


def test_a_network_trains_without_a_compiler(tmp_path):
    without = {"PATH": str(tmp_path), "CXX": "no-such-compiler -O2", "XDG_CACHE_HOME": str(tmp_path)}
    ran = forks.run(train_without_kernels, environment=without)
    assert ran.returncode == 0, ran.stderr
    assert "compiling" not in ran.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("sources")
def test_types_without_a_kernel_are_left_to_torch():
    assert exponential(torch.ones(3, dtype=torch.bfloat16)) is None
    assert _compile.cpu_function("exponential", "exponential", torch.ones(3), torch.ones(3).float()) is None
    assert _compile.cpu_function("exponential", "exponential", torch.ones(3)) is not None


def test_an_unknown_backend_is_refused_and_the_choice_ends_with_its_block():
    with pytest.raises(ValueError, match="'auto', 'eager', 'reference', 'irreps' or 'expanded'"), use_backend("fast"):
        pass
    with pytest.raises(KeyError), use_backend("eager"):
        raise KeyError
    assert _dispatch._backend == "auto"


@pytest.mark.usefixtures("sources")
def test_threads_that_ask_at_once_get_one_kernel(tmp_path):
    x = torch.ones(3)
    with ThreadPoolExecutor(4) as pool:
        assert all(y is not None for y in pool.map(lambda _: exponential(x), range(4)))
    assert len(list((tmp_path / "cache" / "eqzoo" / "kernels").glob("*.so"))) == 1


def compile_the_test_kernel(folder):
    _compile._SOURCES = folder
    assert exponential(torch.ones(3)) is not None


def test_processes_that_ask_at_once_compile_once(sources, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(lambda _: forks.run(compile_the_test_kernel, sources), range(3)))
    assert [each.returncode for each in ran] == [0, 0, 0], ran
    assert "".join(each.stderr for each in ran).count("compiling") == 1
    assert len(list((tmp_path / "cache" / "eqzoo" / "kernels").glob("*.so"))) == 1


@pytest.mark.usefixtures("sources")
def test_without_a_home_kernels_are_built_for_the_process(monkeypatch, capfd):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", homeless)
    assert exponential(torch.ones(3)) is not None
    assert _compile._cache() is None
    assert list(_compile._temporary_folder().glob("*.so"))
    assert "for this processor, for this process alone, as its cache cannot be written\n" in capfd.readouterr().err


@pytest.mark.usefixtures("sources")
def test_a_filled_cache_serves_where_nothing_can_be_written_or_compiled(tmp_path, monkeypatch, capfd):
    """As in a container whose image was built with it."""
    assert exponential(torch.ones(3)) is not None
    assert capfd.readouterr().err.count("compiling") == 1
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: "kernels" not in str(path) and access(path, mode))
    forget()
    assert exponential(torch.ones(3)) is not None
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "")
    forget()
    assert exponential(torch.ones(3)) is not None
    assert capfd.readouterr().err == ""
    assert exponential(torch.ones(3).float()) is None  # not in it, and no compiler
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    forget()
    assert exponential(torch.ones(3)) is not None
    assert "for this process alone, as its cache cannot be written" in capfd.readouterr().err


@pytest.mark.usefixtures("sources")
def test_processes_do_without_locks_of_files_where_there_are_none(monkeypatch):
    import fcntl

    def refusing(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refusing)
    assert exponential(torch.ones(3)) is not None


@pytest.mark.usefixtures("sources")
def test_a_damaged_kernel_is_built_again(tmp_path, capfd):
    """Loading a truncated one would end the process with a bus error."""
    assert exponential(torch.ones(3)) is not None
    (built,) = (tmp_path / "cache" / "eqzoo" / "kernels").glob("*.so")
    whole = built.read_bytes()
    built.unlink()  # this process has it in memory
    built.write_bytes(whole[:1000])
    forget()
    assert torch.allclose(exponential(torch.ones(3)), torch.ones(3).exp())
    assert capfd.readouterr().err.count("compiling") == 2
    (again,) = built.parent.glob("*.so")
    assert len(again.read_bytes()) > 1000


@pytest.mark.usefixtures("sources")
def test_a_kernel_that_may_not_be_executed_where_it_lies_is_loaded_from_elsewhere(monkeypatch):
    """As on a file system that is mounted noexec."""
    load = ctypes.CDLL

    def refusing(path):
        if "cache" in path:
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refusing)
    assert torch.allclose(exponential(torch.ones(3)), torch.ones(3).exp())


def test_the_compiler_that_the_user_chose_is_used_or_missed(sources, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.warns(UserWarning, match="there is no CXX=no-such-compiler -O1; /.* compiles"):
        assert exponential(torch.ones(3)) is not None
    own = tmp_path / "own"
    own.write_text('#!/bin/sh\necho "$@" "$TMPDIR" >> ' + str(tmp_path / "calls") + '\nshift\nexec c++ "$@"\n')
    own.chmod(0o755)
    forget()
    monkeypatch.setenv("CXX", f"{own} first")
    assert exponential(torch.ones(3)) is not None
    version, build = (tmp_path / "calls").read_text().splitlines()[:2]
    assert version.startswith("first --version")
    assert build.startswith("first -std=c++17")
    assert build.rpartition(" ")[2].startswith(f"{tmp_path}/cache/")  # TMPDIR, as that of the system may be full
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    for wrong, said in (("g++ 'a", "No closing quotation"), (str(broken), "Exec format error")):
        (sources / "exponential.cpp").write_text(EXPONENTIAL + f"// {wrong}")
        forget()
        monkeypatch.setenv("CXX", wrong)
        with pytest.warns(UserWarning, match=said):
            assert exponential(torch.ones(3)) is None
    forget()
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match="false says: nothing, and ends with 1"):
        assert exponential(torch.ones(3)) is None


def test_shapes_that_do_not_fit_are_refused_before_a_kernel_reads_them():
    x = torch.zeros(1, 4, 4, 5, 5)
    identity = AffineBank(None, None)
    for keys, side, message in (
        (AffineBank(torch.zeros(4, 4, 4, 9), None), 5, r"psi of the key map has shape \(4, 4, 4, 25\)"),
        (AffineBank(None, torch.zeros(4, 1, 9)), 3, r"beta of the key map has shape \(4, 4, 9\)"),
        (identity, 2, "windows have odd sides"),
    ):
        with pytest.raises(ValueError, match=message):
            affine_attention(x, x, x, AffineBanks(identity, keys, identity), side, 2, 1.0)
    planes, filters = torch.zeros(1, 8, 5, 5), torch.zeros(8, 8, 3, 3)
    for poses, spatial, message in (
        (3, None, r"x has shape \(\*, 6"),
        (4, torch.zeros(8, 6, 3, 3), r"spatial has shape \(8, 8, 3, 3\)"),
        (4, torch.zeros(8, 8, 4, 4), "windows have odd sides"),
    ):
        with pytest.raises(ValueError, match=message):
            attentive_conv(planes, filters, None, None, spatial, poses)
    with pytest.raises(ValueError, match=r"filters has shape \(8, 8, 5, 5\)|filters has shape \(8, 8, 3, 3\)"):
        attentive_conv(planes, torch.zeros(8, 8, 3, 5), None, None, None, 4)
    for arguments, message in (
        ((planes, None, None, torch.zeros(2, 8, 3, 3), 4), r"spatial has shape \(4, 8, 3, 3\)"),
        ((planes, torch.zeros(4, 8, 1, 1), torch.zeros(8, 8, 1, 1), torch.zeros(4, 8, 3, 3), 4), "expand has"),
        ((planes, None, None, torch.zeros(3, 8, 3, 3), 3), r"x has shape \(\*, 6"),
    ):
        with pytest.raises(ValueError, match=message):
            attend_input(*arguments)
    with pytest.raises(RuntimeError, match="weight"):
        batch_norm(x, None, None, torch.ones(1), training=True)
    for shape, padding in (((1, 64, 4, 0, 2), 1), ((1, 64, 4, 2, 2), 0)):  # an integer division by zero in C++
        with pytest.raises(ValueError, match="does not fit"):
            group_conv2d(torch.zeros(shape), torch.zeros(64, 256, 3, 3), None, P4, padding=padding)
    with pytest.raises(ValueError, match="at least one pixel"):
        affine_attention(*[torch.zeros(1, 4, 4, 0, 5)] * 3, AffineBanks(identity, identity, identity), 3, 2, 1.0)
    ab, e = torch.zeros(4, 1, 16, 8), torch.zeros(2, 1, 16, 16)
    for function, arguments, message in (
        (octic_gelu, (ab, e[..., :8]), "e has shape"),
        (stack_heads, (ab, e[..., :8], 2, 4), "e has shape"),
        (octic_norm, (ab, e, torch.ones(24), torch.zeros(8)), r"weight has shape \(48\)"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    empty = torch.zeros(1, 2, 4, 0, 3)
    with pytest.raises(ValueError, match="at least one pixel"):
        generated_depthwise(empty, torch.zeros(4, 1, 9, 2), torch.zeros(4, 1, 9), empty)
