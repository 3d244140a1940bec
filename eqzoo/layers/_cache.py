"""Filter banks that are built once in evaluation mode, and anew when their weights change."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..ops._transforms import is_observed

__all__ = ["CachesFilters", "cached"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_SAMPLE = 1024


class CachesFilters(nn.Module):
    """The base of layers that build filters from their parameters: in evaluation mode they cache what they built.

    Methods marked with `cached` build from the parameters of this module alone. What they gave is given again while the
    module is in evaluation mode, no gradient is asked for, and the parameters are what they were: the same tensors, of
    the same version, in the same memory; and because writing through ``.data`` or numpy changes no version, about a
    thousand of their numbers are compared as well. On a GPU, where that would wait for it, filters are cached only of
    parameters that require no gradient, and a write through ``.data`` there needs a call of `train` or `eval`. Modules
    that are pruned or parametrized, or have a plain tensor in place of a parameter, cache nothing. `train`, ``.to()``
    and its like drop everything. Copies and pickles hold nothing of it, and graphs that are compiled, exported or
    traced build their filters themselves.
    """

    _banks: "_Banks"

    def train(self, mode: bool = True) -> Self:
        self.__dict__.pop("_banks", None)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.__dict__.pop("_banks", None)
        return super()._apply(fn, recurse)


def cached(method: _Method) -> _Method:
    """Marks a method of a `CachesFilters` without arguments, which builds tensors from the module's own parameters."""

    @functools.wraps(method)
    def build_or_reuse(self: Any) -> Any:
        if self.training or torch.compiler.is_compiling() or self._forward_pre_hooks or is_parametrized(self):
            return method(self)  # pruning and weight norms compute parameters from others
        if any(issubclass(kind, Tensor) for kind in set(map(type, self.__dict__.values()))):
            return method(self)  # a tensor in place of a parameter that was deleted, as hypernetworks do
        parameters = [p for p in self._parameters.values() if p is not None]
        if not parameters or not _may_cache(parameters):
            return method(self)
        banks = self.__dict__.get("_banks")
        if banks is None:
            banks = self.__dict__["_banks"] = _Banks()
        entry = banks.entries.get(method.__name__)
        if entry is None or not entry.holds(parameters):
            # What is made in inference mode could not be used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                entry = _Entry.of(parameters, method(self))
            banks.entries[method.__name__] = entry
        return entry.result

    return cast(_Method, build_or_reuse)


def _may_cache(parameters: list[nn.Parameter]) -> bool:
    if is_observed():  # a graph that is recorded would hold what was kept as a constant
        return False
    graph = torch.is_grad_enabled()
    for p in parameters:
        if type(p) is not nn.Parameter or (graph and p.requires_grad) or p.is_inference() or p.is_meta:
            return False
        if p.requires_grad and not p.is_cpu:  # fused optimizers change no version
            return False
    return not torch.jit.is_tracing() and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]


class _Banks:
    """What a module keeps; a copy, or what comes out of a pickle, keeps nothing yet."""

    __slots__: ClassVar = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Banks":
        return _Banks()

    def __copy__(self) -> "_Banks":
        return _Banks()

    def __reduce__(self) -> tuple[type["_Banks"], tuple[()]]:
        return _Banks, ()


class _Entry(NamedTuple):
    """What was built, and from what."""

    result: Any
    tensors: list[Tensor]
    versions: list[int]
    parameters: list[nn.Parameter]
    memory: list[Tensor]  # holds on to it: no other tensor can come to lie there
    samples: list[Tensor]

    @staticmethod
    def of(parameters: list[nn.Parameter], result: Any) -> "_Entry":
        made = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
        tensors = [*parameters, *made]
        memory = [p.detach() for p in parameters]
        return _Entry(
            result, tensors, [t._version for t in tensors], parameters, memory, [_sample(p).clone() for p in memory]
        )

    def holds(self, parameters: list[nn.Parameter]) -> bool:
        """Whether these are the parameters that it was built from, and neither they nor the result has changed."""
        if len(parameters) != len(self.parameters):
            return False
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                return False
        for now, then, memory, sample in zip(parameters, self.parameters, self.memory, self.samples, strict=True):
            if now is not then or now.data_ptr() != memory.data_ptr() or now.dtype != memory.dtype:
                return False
            if not torch.equal(_sample(now.detach()), sample):
                return False
        return True


def _sample(x: Tensor) -> Tensor:
    """About a thousand numbers of a tensor, evenly spread over its memory; none on a GPU, which would be waited for."""
    if not x.is_cpu:
        return x.new_empty(0)
    if 0 in x.stride():
        return x
    step = max(1, x.numel() // _SAMPLE)
    return x.as_strided((x.numel() // step,), (step,))
