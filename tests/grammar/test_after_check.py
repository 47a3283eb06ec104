"""Checks of finished arguments: what they find, what they cannot know, and that nothing can make them hang."""

import asyncio
import json

import pytest

from grammar.checking.checker import Checker, CheckLimits
from grammar.checking.validate import NotCheckable, violations

OBJECT = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}


def test_violations_are_sentences_with_pointers():
    assert violations(OBJECT, '{"a": 2}') == []
    (found,) = violations(OBJECT, '{"a": 1}')
    assert found.startswith("/a: ")
    assert found.endswith("(not)")
    assert violations(False, "1") != []
    with pytest.raises(ValueError, match="Expecting"):
        violations(OBJECT, '{"a": ')


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"type": "string", "nullable": True}, "null", True),
        ({"type": "string"}, "null", False),
        ({"properties": {"nullable": {"type": "boolean"}}}, '{"nullable": 1}', False),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, "1", False),
        ({"items": [{"type": "string"}], "additionalItems": False}, '["a", 1]', False),
        ({"items": [{"type": "string"}], "additionalItems": False}, '["a"]', True),
        ({"prefixItems": [{"type": "string"}], "items": False}, '["a", 1]', False),
        ({"dependencies": {"a": ["b"]}}, '{"a": 1}', False),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, "3", False),
        ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s"}, "1", False),
    ],
)
def test_old_and_new_drafts_mean_what_they_say(schema, text, valid):
    assert (violations(schema, text) == []) == valid


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:1/never"}, {"$ref": "#/$defs/gone"}, {"pattern": "("}, {"type": "dict"}]
)
def test_what_no_validator_takes_cannot_be_checked(schema):
    with pytest.raises(NotCheckable):
        violations(schema, '"a"')


async def test_a_check_that_hangs_is_killed_and_the_next_one_runs():
    checker = Checker(CheckLimits(seconds=3.0))
    try:
        assert (await checker.check(OBJECT, '{"a": 2}')).state == "valid"
        invalid = await checker.check(OBJECT, '{"a": 1}')
        assert invalid.state == "invalid"
        assert "/a" in invalid.found[0]
        checker._limits = CheckLimits(seconds=0.3)
        hung = await checker.check({"type": "string", "pattern": "^(a+)+$"}, json.dumps("a" * 60 + "b"))
        assert hung.state == "unknown"
        assert "more than 0.3 seconds" in hung.found[0]
        checker._limits = CheckLimits(seconds=30.0)
        results = await asyncio.gather(*(checker.check(OBJECT, f'{{"a": {i}}}') for i in range(4)))
        assert [result.state for result in results] == ["valid", "invalid", "valid", "valid"]
        checker._process.kill()
        await checker._process.wait()
        assert (await checker.check(OBJECT, "{}")).state == "valid"
    finally:
        checker.close()


async def test_too_much_is_not_checked():
    checker = Checker(CheckLimits(bytes=100))
    assert (await checker.check(OBJECT, "x" * 200)).state == "unknown"
    assert checker._process is None
