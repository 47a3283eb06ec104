"""Which schemas are compiled where nothing can stop them: the estimate, not the compilation, decides."""

import json

import pytest

from grammar.limits import DEFAULT_LIMITS
from grammar.lowering import parse_source
from grammar.schema import prepare_parameters
from grammar.schemas.cost import distinct_prefixes, estimated_milliseconds


def source_of(*schemas):
    elements = [{"type": "json_schema", "json_schema": schema} for schema in schemas]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def properties(count, **more):
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more}


@pytest.mark.parametrize(
    "schema",
    [
        properties(20),
        properties(200, required=[f"p{i}" for i in range(200)]),
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "^[a-z]{1,64}$"}}},
        {"type": "object", "properties": {"x": {"enum": [f"value{i}" for i in range(1000)]}}},
        properties(5, additionalProperties={"type": "integer"}),
    ],
)
def test_what_compiles_in_moments_needs_no_probe(schema):
    assert parse_source(source_of(schema), DEFAULT_LIMITS).is_cheap(DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "schema",
    [
        properties(500),  # each of these was measured to take 1 to 15 s
        properties(100, minProperties=5),
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "^.{0,1000}$"}}},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "^([a-z]{0,20}-){0,20}$"}}},
        {"type": "object", "properties": {"x": {"enum": [f"value{i}" for i in range(10_000)]}}},
        {"type": "object", "properties": {"p" * 100_000: {"type": "string"}}},
    ],
)
def test_what_takes_a_second_is_tried_in_a_process_of_its_own(schema):
    parsed = parse_source(source_of({"type": "object"}, schema), DEFAULT_LIMITS)
    assert not parsed.is_cheap(DEFAULT_LIMITS)
    assert parsed.heaviest == pytest.approx(parsed.milliseconds, abs=5)


def test_many_light_schemas_are_cheap_where_one_of_their_sum_is_not():
    # All of them different: equal ones are compiled once, and count once.
    schemas = [properties(5, additionalProperties=True, title=str(number)) for number in range(12)]
    many = parse_source(source_of(*schemas), DEFAULT_LIMITS)
    one = parse_source(source_of(*schemas[:1] * 12), DEFAULT_LIMITS)
    assert one.milliseconds == one.heaviest == pytest.approx(many.milliseconds / 12, rel=0.05)
    assert many.milliseconds > DEFAULT_LIMITS.cheap_schema_milliseconds > many.heaviest
    assert many.is_cheap(DEFAULT_LIMITS)


@pytest.mark.parametrize("rest", [True, {}, {"type": "integer"}])
def test_an_open_rest_costs_the_same_however_it_is_written(rest):
    prepared = prepare_parameters("t", properties(5, additionalProperties=rest))
    closed = prepare_parameters("t", properties(5))
    assert estimated_milliseconds(prepared) - estimated_milliseconds(closed) == pytest.approx(15 * 6, abs=2)


@pytest.mark.parametrize("rest", [True, {}, {"type": "integer"}])
def test_an_open_rest_beside_many_names_is_closed_however_it_is_written(rest):
    prepared = prepare_parameters("t", properties(100, additionalProperties=rest))
    assert prepared["additionalProperties"] is False


def test_prefixes_are_counted_once():
    assert distinct_prefixes(["ab", "ac", "ab"]) == 3
    assert distinct_prefixes([]) == 0
