"""Bodies that nest too deeply are refused with the place, and with the tool whose schema it is."""

import json

import pytest

from gateway.apis.bodies import parse_object
from gateway.apis.nesting import _path
from gateway.turn import TurnError


def deep(levels):
    return '{"type": "object", "properties": {"a": ' * levels + "{}" + "}}" * levels


def refused(text):
    with pytest.raises(TurnError) as error:
        parse_object(text.encode())
    assert error.value.status == 400
    return error.value


def test_a_schema_of_a_thousand_levels_names_tool_and_pointer():
    first = '{"type": "function", "function": {"name": "fine", "parameters": {"type": "object", "enum": [[], { }, "x, ]"]}}}'
    second = '{"type": "function", "function": {"name": "deep \\"one\\"", "parameters": ' + deep(1000) + "}}"
    error = refused('{"messages": [], "tools": [' + first + ", " + second + "]}")
    assert error.code == "invalid_schema"
    assert error.param == "/tools/1/function/parameters/properties/a/properties/a"
    assert error.message == (
        "The schema of tool 'deep \"one\"' at '/properties/a/properties/a' nests too deeply to be read. Flatten it."
    )
    unnamed = refused('{"tools": [{"function": {"parameters": ' + deep(1000) + "}}]}")
    assert "The schema of tool 0 at '/properties/a" in unnamed.message


def test_other_places_are_named_too():
    error = refused('{"response_format": {"json_schema": {"schema": ' + deep(1000) + "}}}")
    assert error.param == "/response_format/json_schema/schema/properties/a/properties/a/properties"
    assert "depth limit exceeded at '/response_format/json_schema/schema/" in error.message
    assert refused("[" * 5000).code == "malformed_body"
    assert refused('{"a/b~": ' + "[" * 5000).param.startswith("/a~1b~0/0/0")


@pytest.mark.parametrize(
    "document", [{"a": [1, {"b": [[], {}, "]", {"c": None}]}], "d": {"e": 5, "f": [[1], [2, "x"]]}, "": [{}]}]
)
def test_the_place_is_the_one_that_the_text_has(document):
    """Every value is marked in turn, and the path to the mark is the pointer to it."""

    def places(value, at):
        yield at
        for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            yield from places(child, (*at, key))

    def marked(value, at):
        if not at:
            return "MARK"
        if isinstance(value, dict):
            return {key: marked(child, at[1:]) if key == at[0] else child for key, child in value.items()}
        return [marked(child, at[1:]) if i == at[0] else child for i, child in enumerate(value)]

    for at in places(document, ()):
        text = json.dumps(marked(document, at))
        path, _ = _path(text, text.index('"MARK"'))
        assert path == [str(part) for part in at]
