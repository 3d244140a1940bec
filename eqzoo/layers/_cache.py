"""Caching of filter banks in evaluation mode."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ops._dispatch import is_observed

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Entry(NamedTuple):
    """A result, and the parameters that it was built from."""

    result: Any
    parameters: list[nn.Parameter]
    memory: list[Tensor]  # keeps the memory of the parameters alive, so that its address is that of nothing else
    versions: list[int]  # of the parameters and of the tensors of the result

    def is_valid(self, parameters: list[nn.Parameter]) -> bool:
        """Whether the parameters are the same tensors in the same memory, and nobody has written to them since."""
        if len(parameters) != len(self.parameters) or _versions(parameters, self.result) != self.versions:
            return False
        return all(
            now is then and now.data_ptr() == kept.data_ptr() and now.dtype == kept.dtype
            for now, then, kept in zip(parameters, self.parameters, self.memory, strict=True)
        )


_CACHE: WeakKeyDictionary[nn.Module, dict[str, _Entry]] = WeakKeyDictionary()


class CachesFilters(nn.Module):
    """Base class of layers that build filter banks from their parameters.

    In evaluation mode without gradients, the result of a method marked `cached` is reused until a parameter of the
    module is another tensor, of another version or in other memory. A forward pass with gradients, a step of any
    optimizer, `train`, `eval`, ``.to()`` and its like drop it. A write through ``.data`` changes no version, nor does
    one to a vector that `torch.nn.utils.vector_to_parameters` has made the parameters views of: call `eval` after one,
    unless it follows a step of an optimizer, as that of a moving average does. Pruned and parametrized modules cache
    nothing, nor do graphs that are compiled, exported, traced or captured. Nor is anything cached of parameters in
    shared memory, to which other processes may write, and where `torch.distributed` is initialized: FSDP refills the
    memory of parameters and changes no version.
    """

    def train(self, mode: bool = True) -> Self:
        _CACHE.pop(self, None)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        _CACHE.pop(self, None)
        return super()._apply(fn, recurse)


def cached(method: _Method) -> _Method:
    """Marks a method of a `CachesFilters` without arguments, which builds tensors from the module's own parameters."""

    @functools.wraps(method)
    def build_or_reuse(self: Any) -> Any:
        if torch.compiler.is_compiling() or is_observed() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return method(self)  # a graph would hold the cached tensors as constants
        parameters = [p for p in self._parameters.values() if p is not None]
        if not _may_cache(self, parameters):
            _CACHE.pop(self, None)  # an optimizer may change parameters, and no version
            return method(self)
        entries = _CACHE.setdefault(self, {})
        entry = entries.get(method.__name__)
        if entry is None or not entry.is_valid(parameters):
            # Tensors made in inference mode could not be used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                result = method(self)
            memory = [p.detach() for p in parameters]
            entry = entries[method.__name__] = _Entry(result, parameters, memory, _versions(parameters, result))
        return entry.result

    return cast(_Method, build_or_reuse)


@torch.compiler.disable
def _drop_all(*_: Any) -> None:
    """Drops everything, behind a step of an optimizer.

    Fused ones leave the versions of parameters alone, and so do moving averages that are updated through ``.data``
    then, of networks in evaluation mode; compiled forward passes run no Python that could drop anything.
    """
    _CACHE.clear()


register_optimizer_step_post_hook(_drop_all)


def _may_cache(module: nn.Module, parameters: list[nn.Parameter]) -> bool:
    if module.training or not parameters or is_parametrized(module):
        return False
    if any(isinstance(value, Tensor) for value in module.__dict__.values()):
        return False  # in place of a parameter, as pruning and hypernetworks have it
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if any(p.is_cpu and p.untyped_storage().is_shared() for p in parameters):
        return False
    if parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # the graph would read the memory of what is dropped later
    graph = torch.is_grad_enabled()
    return all(
        type(p) is nn.Parameter and not (graph and p.requires_grad) and not p.is_inference() and not p.is_meta
        for p in parameters
    )


def _versions(parameters: list[nn.Parameter], result: Any) -> list[int]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [t._version for t in (*parameters, *tensors) if isinstance(t, Tensor)]
