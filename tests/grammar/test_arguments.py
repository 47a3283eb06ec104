"""Arguments of past calls as clients send them back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar.arguments import arguments_object


@pytest.mark.parametrize(
    "broken",
    [
        *(
            "",
            "   ",
            "\n",
            None,
            "null",
            "[]",
            "[1]",
            "5",
            '"{}"',
            "{",
            '{"a": 1',
            '{"a": 1}}',
            "{'a': 1}",
            "NaN",
            5,
            1.5,
            True,
            [],
            (),
        ),
        *(b"\xff{}", "\ud800", '{"a": "\ud800"}', "[" * 100_000, '{"a":' * 100_000, object()),
    ],
)
def test_a_bad_old_call_has_no_arguments(broken):
    assert arguments_object(broken) == {}


def test_an_object_or_its_text_is_taken_as_it_is():
    arguments = {"b": [1, None, "é"], "a": {"x": 1.5}}
    assert arguments_object(arguments) is arguments
    assert arguments_object(json.dumps(arguments)) == arguments
    assert list(arguments_object(' {"b": 1, "a": 2}\n')) == ["b", "a"]
    assert arguments_object(b'{"a": 1}') == {"a": 1}
    assert arguments_object("{}") == arguments_object({}) == {}


@given(st.text() | st.binary())
def test_any_text_gives_an_object(text):
    assert isinstance(arguments_object(text), dict)
