"""A pass of training and the step of the optimizer, recorded once as CUDA graphs and replayed for each batch."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from timm.optim import Muon
from torch import Tensor, nn

_Result = TypeVar("_Result")

_WARM_UPS = 3  # as many as torch's own recordings: kernels are compiled and chosen, workspaces allocated


class RecordedPass:
    """The kernels of a pass, launched all at once.

    Most kernels of a small network take less time than their launch from Python, so that the GPU waits for the CPU. A
    replay launches the recorded kernels again, on the same memory: results are those of the pass itself, up to the
    order of sums. `torch.cuda.make_graphed_callables` would record the network alone, without augmentation and loss,
    and leave the running statistics of its warm-up.

    Args:
        run: The pass: augmentation, network, loss and gradients; returns the loss. What it gives may depend on nothing
            but tensors, and it may not wait for the GPU.
        model: The network whose gradients ``run`` sets.
        inputs: Arguments of ``run``, on the GPU; later ones have their shapes and types.

    Raises:
        ValueError: If the pass cannot be recorded.

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, run: Callable[..., Tensor], model: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._inputs = [given.clone() for given in inputs]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._graph = torch.cuda.CUDAGraph()
        # Kept, as each replay reads their memory, and `train` and `eval` put others in the place of tables of indices.
        self._buffers = list(model.buffers())
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        drawn = torch.cuda.get_rng_state()
        try:
            self._warm_up(run)
            self._clear()
            self._loss = _record(self._graph, lambda: run(*self._inputs), type(model).__name__)
            self._gradients = [p.grad for p in self._parameters]
        finally:
            with torch.no_grad():  # the warm-up moved running statistics and drew numbers
                for buffer, before in buffers:
                    buffer.copy_(before)
            torch.cuda.set_rng_state(drawn)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Replays the pass; its gradients are in the parameters. The loss is overwritten by the next call."""
        for recorded, given in zip(self._inputs, inputs, strict=True):
            recorded.copy_(given, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _warm_up(self, run: Callable[..., Tensor]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._clear()
                run(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)

    def _clear(self) -> None:
        """Without gradients, so that a pass writes new ones and adds to none."""
        for parameter in self._parameters:
            parameter.grad = None


class RecordedStep:
    """The step of an optimizer, launched all at once.

    Muon launches thirty small kernels for each matrix, so that its step takes longer than the pass of a small network.
    The first steps run as they are, so that kernels are chosen and states exist; the next one is recorded. Learning
    rates are read from the groups of parameters before each step.

    Args:
        optimizer: An optimizer that `fits`; its parameters have gradients in the same memory in each step.

    Raises:
        ValueError: If the step cannot be recorded, when it is called.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        device = optimizer.param_groups[0]["params"][0].device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        set_capturable(optimizer, True)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether all that changes can be in tensors: so torch documents it of Adam and AdamW, and timm of Muon."""
        kinds = (torch.optim.Adam, torch.optim.AdamW, Muon)
        return isinstance(optimizer, kinds) and not any(group.get("fused") for group in optimizer.param_groups)

    def __call__(self) -> None:
        """Updates the parameters."""
        groups = self._optimizer.param_groups
        given = [group["lr"] for group in groups]
        for rate, value in zip(self._rates, given, strict=True):
            rate.fill_(value)
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            self._step()
        finally:
            for group, value in zip(groups, given, strict=True):
                group["lr"] = value

    def _step(self) -> None:
        self._steps += 1
        if self._steps <= _WARM_UPS:
            self._optimizer.step()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            _record(graph, self._optimizer.step, f"the step of {type(self._optimizer).__name__}")
            self._graph = graph
        self._graph.replay()


def set_capturable(optimizer: torch.optim.Optimizer, capturable: bool) -> None:
    """Whether a step may be recorded: the numbers of steps are then on the device of the parameters."""
    for group in optimizer.param_groups:
        if group.get("capturable", capturable) == capturable:  # it has none, or is as asked
            continue
        group["capturable"] = optimizer.defaults["capturable"] = capturable
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(parameter.device if capturable else "cpu")


def _record(graph: torch.cuda.CUDAGraph, run: Callable[[], _Result], name: str) -> _Result:
    before = torch.cuda.current_stream()
    try:
        # Threads that read images may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return run()
    except RuntimeError as error:
        torch.cuda.set_stream(before)  # where torch could not end the recording, it stays in its stream
        with contextlib.suppress(RuntimeError):  # the error that is told is the first
            _end_recording()
        if isinstance(error, torch.OutOfMemoryError):
            raise
        said = f"{name} cannot be recorded as a CUDA graph; set cuda_graphs=false: {error.__context__ or error}"
        raise ValueError(said) from error


def _end_recording() -> None:
    """Makes torch draw numbers again, as for dropout: where it could not end a recording, its generator refuses.

    The end of any later recording releases the generator.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda").add_(1)
