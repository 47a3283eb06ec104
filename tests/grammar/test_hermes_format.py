"""Hermes prompt, grammar source and history: the bytes that models were trained on, and the choices."""

import json

import pytest

from grammar.deltas import TextDelta, ToolCallStart
from grammar.formats import format_for, format_named
from grammar.formats.hermes import HermesFormat
from grammar.limits import GrammarLimits
from grammar.tools import GrammarRefused, ResponseFormat, Tool, ToolChoice

WEATHER = Tool("get_weather", "Weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
PING = Tool("ping")
HERMES = HermesFormat()


def form(source):
    tag = json.loads(source)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def test_hermes_prompt_is_what_the_models_were_trained_on():
    assert HERMES.system_prompt([WEATHER]) == (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}\n'
        "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def test_hermes_prompt_keeps_order_and_characters_and_is_the_same_each_time():
    tools = [Tool("zéta", "naïve 😀"), Tool("alpha"), PING]
    prompt = HERMES.system_prompt(tools)
    assert prompt == HermesFormat().system_prompt(list(tools))
    assert "naïve 😀" in prompt
    assert prompt.index("zéta") < prompt.index('"alpha"') < prompt.index('"ping"')
    assert '{"name": "ping", "parameters": {"type": "object", "properties": {}}}' in prompt
    assert HERMES.system_prompt([]) == ""


def test_hermes_braces_in_descriptions_are_no_format_fields():
    assert "{tools} {0} {{x}}" in HERMES.system_prompt([Tool("t", "{tools} {0} {{x}}")])


def test_hermes_history_is_rendered_as_the_model_writes_it():
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    calls = [("get_weather", {"city": "Zürich"}), ("ping", {})]
    assert HERMES.render_call(*calls[0]) == one
    assert HERMES.render_calls("", calls) == f"{one}\n{two}"
    assert HERMES.render_calls("I look.", calls) == f"I look.\n{one}\n{two}"
    assert HERMES.render_calls("Only text.", []) == "Only text."
    assert HERMES.render_result("12 °C", name="get_weather", call_id="c1") == "<tool_response>\n12 °C\n</tool_response>"


def test_hermes_is_the_format_of_templates_without_markers():
    assert format_for(None).name == format_for("{{ messages }}").name == format_named("hermes").name == "hermes"
    assert format_for(None).exempt_regions == (("<tool_call>", "</tool_call>"),)
    with pytest.raises(KeyError, match=r"no tool-call format named 'xml'.*hermes"):
        format_named("xml")


def test_without_tools_and_response_format_any_text_is_allowed():
    assert HERMES.structural_tag([]) is None
    assert HERMES.structural_tag([], ToolChoice("none")) is None


def test_choice_none_keeps_calls_out_of_the_text():
    assert form(HERMES.structural_tag([WEATHER], ToolChoice("none"))) == {"type": "any_text", "excludes": ["<tool_call>"]}
    assert HERMES.structural_tag([WEATHER], ToolChoice("auto", allowed=())) == HERMES.structural_tag([PING], ToolChoice("none"))


@pytest.mark.parametrize(
    ("choice", "only_one"),
    [
        (ToolChoice("required"), False),
        (ToolChoice("required", parallel=False), True),
        (ToolChoice("named", name="ping"), True),
        (ToolChoice("named", name="ping", parallel=True), True),
    ],
)
def test_forced_choices_begin_with_a_call(choice, only_one):
    begin, calls = form(HERMES.structural_tag([WEATHER, PING], choice))["elements"]
    assert begin == {"type": "const_string", "value": "<tool_call>"}
    assert calls["at_least_one"] is True
    assert calls["stop_after_first"] is only_one
    assert [tag["content"]["json_schema"]["title"] for tag in calls["tags"]] == (
        ["ping"] if choice.mode == "named" else ["get_weather", "ping"]
    )


def test_auto_leaves_text_free_until_a_call_begins():
    source = HERMES.structural_tag([WEATHER, PING])
    assert form(source)["type"] == "dispatch"
    assert form(source)["rules"][0][0] == "<tool_call>"
    assert source == HermesFormat().structural_tag([WEATHER, PING], ToolChoice("auto"))


def test_allowed_names_restrict_grammar_and_parser():
    choice = ToolChoice("required", allowed=("ping",))
    calls = form(HERMES.structural_tag([WEATHER, PING], choice))["elements"][1]
    assert [tag["content"]["json_schema"]["title"] for tag in calls["tags"]] == ["ping"]
    text = HERMES.render_call("get_weather", {})
    parser = HERMES.parser([WEATHER, PING], choice, lambda: "id")
    assert [*parser.feed(text), *parser.finish()] == [TextDelta("<tool_call>"), TextDelta(text[len("<tool_call>") :])]
    parser = HERMES.parser([WEATHER, PING], choice, lambda: "id")
    assert parser.feed(HERMES.render_call("ping", {}))[0] == ToolCallStart(0, "id", "ping")


def test_choice_none_reads_no_calls():
    text = HERMES.render_call("ping", {})
    parser = HERMES.parser([PING], ToolChoice("none"), lambda: "id")
    assert [*parser.feed(text), *parser.finish()] == [TextDelta(text)]


@pytest.mark.parametrize(
    ("tools", "choice", "words", "tool"),
    [
        ([], ToolChoice("required"), "requires a call, but there is no tool", None),
        ([PING], ToolChoice("required", allowed=()), "requires a call, but there is no tool", None),
        ([PING], ToolChoice("named", name="pong"), "names 'pong', which is not among the tools", "pong"),
        ([PING], ToolChoice("named"), "names None, which is not among the tools", None),
        ([PING], ToolChoice("auto", allowed=("pong",)), "allows 'pong', which is not among the tools", "pong"),
        ([PING, WEATHER, PING], ToolChoice(), "Two tools are named 'ping'", "ping"),
        ([Tool("")], ToolChoice(), "empty name", ""),
        ([Tool("two words")], ToolChoice(), "'two words' may only hold", "two words"),
        ([Tool('quo"te')], ToolChoice("none"), "may only hold", 'quo"te'),
        ([Tool("naïve")], ToolChoice(), "may only hold", "naïve"),
        ([Tool("n" * 200)], ToolChoice(), "has 200 characters; at most 128 are allowed", "n" * 200),
        ([PING, WEATHER], ToolChoice("named", name="ping"), None, None),
    ],
)
def test_choices_and_names_that_cannot_be_met_are_refused(tools, choice, words, tool):
    if words is None:
        assert HERMES.structural_tag(tools, choice) is not None
        return
    with pytest.raises(GrammarRefused) as refused:
        HERMES.structural_tag(tools, choice)
    assert words in refused.value.message
    assert refused.value.message.endswith(".")
    assert refused.value.tool == tool


def test_more_tools_than_the_limit_are_refused():
    limited = HermesFormat(GrammarLimits(max_tools=2))
    with pytest.raises(GrammarRefused, match="There are 3 tools; at most 2 are allowed"):
        limited.structural_tag([Tool("a"), Tool("b"), Tool("c")])


def test_a_json_answer_without_a_schema_is_refused():
    with pytest.raises(GrammarRefused, match="needs a schema"):
        HERMES.structural_tag([], ToolChoice(), ResponseFormat("json_schema"))


def test_response_formats_beside_tools():
    answer = ResponseFormat("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    alone = form(HERMES.structural_tag([], ToolChoice(), answer))
    assert alone["json_schema"] == {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert form(HERMES.structural_tag([PING], ToolChoice("none"), answer)) == alone
    both = form(HERMES.structural_tag([PING], ToolChoice("auto"), answer))
    assert both["type"] == "or"
    assert both["elements"][1] == alone
    assert HERMES.structural_tag([PING], ToolChoice("required"), answer) == HERMES.structural_tag(
        [PING], ToolChoice("required")
    )
