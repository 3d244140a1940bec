"""The version, file writes, settings from the command line, the cores of the machine, and interleaved timing."""

import json
import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

__version__ = "0.1.0"

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

K = TypeVar("K")
T = TypeVar("T")


def lazy_names(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are imported when they are first used (PEP 562).

    Args:
        package: The name of the package.
        modules: Its modules, with the names that each defines.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def network_name(model: object) -> str:
    """What a network is called: its registered name, or its class if it has none."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__


def atomic(path: Path, write: Callable[[Path], T]) -> T:
    """Writes a file atomically: to a temporary name beside it, then renamed into place.

    A reader sees the old file or the new one, never a part of it, and an interrupted write leaves the old one.

    Args:
        path: The file.
        write: Writes to the temporary path that it is given.

    Returns:
        What ``write`` returned.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        result = write(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return result


def json_text(values: Mapping[str, Any]) -> str:
    """The text of a JSON file, as this package writes them: indented, a list of numbers on one line."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    return re.sub(r'\[\n([^][{}"]+)\]', lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json_text(values))


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, with the same bytes on all systems."""
    atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def parse_settings(items: Iterable[str]) -> dict[str, Any]:
    """The values of an option ``--set KEY=VALUE ...``, which are JSON or, where they are not, words.

    Args:
        items: What follows the option.

    Raises:
        ValueError: If one of the items has no key or no equals sign, a key comes twice, also in an object, or a value
            begins as a list or an object of JSON does and is none.

    Example:
        >>> parse_settings(["lr=0.01", "milestones=[20, 40]", "optimizer=sgd"])
        {'lr': 0.01, 'milestones': [20, 40], 'optimizer': 'sgd'}
    """
    found: dict[str, Any] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise ValueError(f"--set takes KEY=VALUE, got {item!r}")
        if key in found:
            raise ValueError(f"--set takes each key once, and {key} comes twice")
        try:
            found[key] = json.loads(value, object_pairs_hook=_each_once)
        except KeyError as twice:
            raise ValueError(f"--set {key} takes each name once, and {twice.args[0]!r} comes twice") from twice
        except ValueError as error:
            if value[:1] in ("{", "["):
                said = (
                    f"--set {key} is no JSON ({error}): names in double quotes, all of it in single ones; got {value!r}"
                )
                raise ValueError(said) from error
            found[key] = value  # a word needs no quotes
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON with these entries; Python's own would keep the last of those that share a name."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise KeyError(name)
        found[name] = value
    return found


def setting_text(value: Any) -> str:
    """A setting as it is shown, which `parse_settings` takes: six digits of a number, a word, or JSON.

    Example:
        >>> setting_text(0.3), setting_text("adam"), setting_text(True), setting_text({"head.*": 3.0})
        ('0.3', 'adam', 'true', '{"head.*": 3.0}')
    """
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def usable_cores() -> int:
    """The cores that this process may use: those of its affinity, at most the CPU limit of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_LIMIT.read_text(encoding="utf-8").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max", which is no limit
        return cores


def interleaved_times(
    functions: Mapping[K, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    at_most: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> dict[K, list[float]]:
    """Times functions in rounds, in each of which every function runs once; so other load slows them all alike.

    The clock is that of `torch.utils.benchmark`, which waits for the accelerator. Its Timer is not used: it measures
    one function after the other, so that other load on the machine may slow one alone.

    Args:
        functions: The functions.
        rounds: The number of rounds that are timed.
        warm_up: The rounds before them that are not.
        at_most: The seconds after which no further round begins, once two rounds have been timed.
        clock: Another clock, such as `time.process_time`, which counts this process alone.

    Returns:
        The time of each round for each function, in seconds.
    """
    from torch.utils import benchmark

    timer = clock or benchmark.timer
    times: dict[K, list[float]] = {key: [] for key in functions}
    began = timer()
    for index in range(warm_up + rounds):
        if index >= warm_up + 2 and timer() - began > at_most:
            break
        # The order is reversed in every other round, so that no function always finds the warmer cache.
        for key in list(functions)[:: -1 if index % 2 else 1]:
            start = timer()
            functions[key]()
            taken = timer() - start
            if index >= warm_up:
                times[key].append(taken)
    return times
