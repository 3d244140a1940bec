"""Small helpers: files, JSON, settings from the command line, and interleaved timing."""

import errno
import json
import time

import pytest

from eqzoo._common import atomic, interleaved_times, json_text, parse_settings


def test_functions_are_timed_in_turn_and_the_warm_up_is_left_out():
    calls = []
    times = interleaved_times({key: lambda key=key: calls.append(key) for key in "ab"}, rounds=3, warm_up=1)
    assert "".join(calls) == "abbaabba"
    assert [len(values) for values in times.values()] == [3, 3]


def test_no_round_begins_after_the_time_is_over():
    """Two rounds are timed nevertheless."""
    times = interleaved_times({"slow": lambda: time.sleep(0.01)}, rounds=100, warm_up=1, at_most=0.001)
    assert len(times["slow"]) == 2
    assert min(times["slow"]) >= 0.01


def test_settings_are_json_or_words():
    found = parse_settings(["lr=0.1", 'model_args={"depth": 3}', "model=p4=cnn", "start=null"])
    assert found == {"lr": 0.1, "model_args": {"depth": 3}, "model": "p4=cnn", "start": None}
    for item in ('lr_factors={"head.*": 3', "lr_factors={'head.*': 3}", "milestones=[2,"):
        with pytest.raises(ValueError, match=r"--set \w+ is no JSON \(.*column.*\): names in double quotes.*; got "):
            parse_settings([item])
    for item in ('lr_factors={"a.*": 3, "a.*": 2}', 'model_args={"a": [{"a.*": 1, "a.*": 1}]}'):
        with pytest.raises(ValueError, match=r"--set \w+ takes each name once, and 'a\.\*' comes twice"):
            parse_settings([item])
    for item in ("lr", "=3"):
        with pytest.raises(ValueError, match=f"KEY=VALUE, got '{item}'"):
            parse_settings([item])


def test_json_has_a_list_of_numbers_on_one_line_and_keeps_what_is_written():
    values = {"confusion": [[1, 2], [-3.5, None]], "names": ["[\n1, 2\n]", "b"], "empty": [], "rows": [{"a": [1e-9]}]}
    text = json_text(values)
    assert json.loads(text) == values
    assert text.splitlines()[2:4] == ["    [1, 2],", "    [-3.5, null]"]


def test_a_full_disk_is_said_with_the_file(tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def wrong(_):
        raise OSError("cannot write mode RGBA as JPEG")

    with pytest.raises(OSError, match=r"No space left.*state\.pt"):
        atomic(tmp_path / "state.pt", full)
    with pytest.raises(OSError, match="mode RGBA"):
        atomic(tmp_path / "figure.jpg", wrong)
    assert not [*tmp_path.iterdir()]
