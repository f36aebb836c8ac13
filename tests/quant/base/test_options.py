"""Messages name options as the reader writes them: in a terminal, or as parameters in Python."""

from __future__ import annotations

import pytest

from quant.base.errors import in_command, option


@pytest.mark.parametrize(
    ("arguments", "in_terminal", "in_python"),
    [
        (("kv_cache", "fp8"), "--kv-cache fp8", 'kv_cache="fp8"'),
        (("capacity", 64), "--capacity 64", "capacity=64"),
        (("whole_groups", True), "--whole-groups", "whole_groups=True"),
        (("baseline",), "--baseline", "baseline="),
        (("exclude", "'*.experts.*'"), "--exclude '*.experts.*'", "exclude='*.experts.*'"),
        (("calib", "text.txt"), "--calib text.txt", 'data="text.txt"'),
        (("input", "x:fp32:2,64"), "--input x:fp32:2,64", 'inputs={"x": "fp32:2,64"}'),
    ],
)
def test_an_option_is_spelled_for_its_reader(arguments: tuple[object, ...], in_terminal: str, in_python: str) -> None:
    assert option(*arguments) == in_python  # type: ignore[arg-type]
    with in_command():
        assert option(*arguments) == in_terminal  # type: ignore[arg-type]
    assert option(*arguments) == in_python  # type: ignore[arg-type]
