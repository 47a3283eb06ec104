"""Every format against itself: what its grammar lets a model write, its parser reads, its template writes back, token by token.

The vocabulary is a small byte-level one with the control tokens that the format's real models add; the templates are in
format_templates.py.
"""

import itertools
import json
from random import Random

import format_templates as templates
import jsonschema
import pytest
import torch
from format_tokenizers import SPECIAL, write_tokenizer
from format_walking import Walker
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rendering import ChatRenderer
from grammar.compiler import GrammarCompiler
from grammar.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.detokenizer import Detokenizer
from grammar.formats.registry import FORMAT_NAMES, format_named, recognised
from grammar.tools import GrammarRefused, ResponseFormat, Tool, ToolChoice
from tests.gateway.http import chat_template_texts as texts

TEMPLATES = {
    "hermes": texts.QWEN_2_5,
    "llama3_json": templates.LLAMA_JSON,
    "pythonic": templates.PYTHONIC,
    "mistral": templates.MISTRAL_ARGS,
    "mistral_json": templates.MISTRAL_LIST,
    "mistral_json_spaced": texts.MISTRAL,
    "qwen3_coder": templates.QWEN3_CODER,
    "deepseek_v3": templates.DEEPSEEK_V3,
    "deepseek_v31": templates.DEEPSEEK_V31,
    "harmony": templates.HARMONY,
    "glm": templates.GLM,
    "glm47": templates.GLM47,
}
WITH_IDS = {"mistral_json_spaced"}
"""Templates that write ids, which the model does not: their texts agree up to them."""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "unit": {"enum": ["c", "f"]},
        "where": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool("get_weather", "Weather", WEATHER), Tool("now", "The time", {"type": "object", "properties": {}}))
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
USER = {"role": "user", "content": "How is the weather?"}


class Setting:
    """A format with its tokenizer, template and compiler."""

    def __init__(self, name, source, directory):
        path = directory / f"{name}.json"
        self.name = name
        self.tokenizer, self.stops = write_tokenizer(source, path, name)
        self.format = format_named(name, special_tokens=frozenset(SPECIAL[name]) | {"<|im_start|>"})
        self.width = self.tokenizer.get_vocab_size() + 8
        self.compiler = GrammarCompiler(path, self.width, self.stops)
        special = {"bos_token": "", "eos_token": "<|im_end|>"}
        self.renderer = ChatRenderer({"default": TEMPLATES[name]}, special, self.format, model=name)
        self.walker = Walker(self.tokenizer, self.width, self.stops)
        self.detokenizer = Detokenizer(self.tokenizer).showing(self.format.visible_tokens)

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids):
        stream = self.detokenizer.fresh().showing(self.format.visible_tokens)
        return stream.feed([token for token in ids if token not in self.stops]) + stream.finish()

    def matcher(self, choice, **more):
        return self.compiler.compile(self.format.structural_tag(TOOLS, choice, **more)).matcher()

    def parse(self, pieces, choice=ToolChoice("auto"), tools=TOOLS):
        numbers = itertools.count()
        parser = self.format.parser(tools, choice, lambda: f"id{next(numbers):07}")
        return joined([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])


@pytest.fixture(scope="module")
def settings_of(tiny_checkpoint, tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("formats")
    made = {}

    def make(name):
        if name not in made:
            made[name] = Setting(name, tiny_checkpoint("llama") / "tokenizer.json", directory)
        return made[name]

    yield make
    for setting in made.values():
        setting.compiler.close()


def joined(deltas):
    """Neighbouring pieces of one kind as one."""
    out = []
    for delta in deltas:
        last = out[-1] if out else None
        if type(delta) is type(last) and isinstance(delta, TextDelta | ReasoningDelta):
            out[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments):
            out[-1] = ToolCallArguments(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out


def calls_in(deltas):
    """(name, arguments as text, complete) of the calls, in order; their indices have to count."""
    calls = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            calls.append([delta.name, "", None])
        elif isinstance(delta, ToolCallArguments):
            assert delta.index == len(calls) - 1
            assert calls[-1][2] is None
            calls[-1][1] += delta.text
        elif isinstance(delta, ToolCallEnd):
            assert delta.index == len(calls) - 1
            calls[-1][2] = delta.complete
    return [tuple(call) for call in calls]


def test_the_template_names_the_format():
    assert {name: recognised(template) for name, template in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert set(TEMPLATES) == set(FORMAT_NAMES)
    assert recognised(None) == recognised("{{ messages }}") == "hermes"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_templates_write_calls_themselves(settings_of, name):
    traits = settings_of(name).renderer.traits()
    assert traits.renders_calls
    assert traits.shows_tools == (not name.startswith("deepseek"))  # DeepSeek's templates leave the tools to the caller


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("auto", max_calls=2)], ids=["required", "auto"])
def test_what_the_grammar_lets_be_written_is_what_the_template_writes_back(settings_of, name, choice):
    """Random walks through the grammar: each call parses and validates, and rendered again it is the same tokens."""
    setting = settings_of(name)
    start = ()
    if choice.mode == "auto":
        begin = setting.format.lead + setting.format.section.begin
        start = setting.ids(" to=functions.now" if name == "harmony" else begin)
    prompt = setting.renderer.render([USER], TOOLS)
    seen = set()
    for seed in range(6):
        ids, ended = setting.walker.walk(setting.matcher(choice), Random(f"{name}{seed}"), start)
        text = setting.text(ids)
        deltas = setting.parse([text], choice)
        assert setting.parse(text, choice) == deltas
        calls = calls_in(deltas)
        if not ended:
            continue
        if choice.mode == "required":
            assert calls
        for called, arguments, complete in calls:
            assert complete, text
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            seen.add(called)
        if calls and not any(isinstance(delta, TextDelta | ReasoningDelta) for delta in deltas):
            check_rendered_again(setting, prompt, text, calls)
    assert seen or choice.mode == "auto"


def check_rendered_again(setting, prompt, text, calls):
    written = [
        {"id": f"abcdefg{i:02}", "type": "function", "function": {"name": called, "arguments": json.loads(arguments)}}
        for i, (called, arguments, _) in enumerate(calls)
    ]
    if any(json.dumps(json.loads(arguments), ensure_ascii=False) != arguments for _, arguments, _ in calls):
        return  # a number that JSON writes in several ways, such as -0
    message = {"role": "assistant", "content": "", "tool_calls": written}
    if setting.name == "mistral_json_spaced":
        message.pop("content")
    again = setting.renderer.render([USER, message], TOOLS, add_generation_prompt=False)
    if setting.name in WITH_IDS:
        for i in range(len(calls)):
            again = again.replace(f', "id": "abcdefg{i:02}"', "")
    if setting.name == "harmony" and not text.startswith(" to="):
        return  # the other place of the recipient, or reasoning without a word
    whole = prompt + text
    assert again.startswith(whole)
    assert setting.ids(again)[: len(setting.ids(whole))] == setting.ids(whole)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_text_under_auto_is_free_and_cannot_be_a_call_under_none(settings_of, name):
    setting = settings_of(name)
    header = "<|channel|>final<|message|>" if name == "harmony" else ""
    said = header + 'Hello {"a": [1]} <b>x</b> [y]; 漢字 😀'
    call = setting.format.render_calls("", [("now", {})])
    for choice in (ToolChoice("auto"), ToolChoice("none")):
        matcher = setting.matcher(choice)
        assert all(matcher.accept(token) for token in setting.ids(said))
        assert matcher.is_completed()
        matcher = setting.matcher(choice)
        accepted = all(matcher.accept(token) for token in setting.ids(call))
        assert accepted == (choice.mode == "auto"), choice
    assert setting.parse([said]) == [TextDelta(said.removeprefix(header))]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_single_call_is_the_last_thing_under_no_parallel_calls(settings_of, name):
    setting = settings_of(name)
    text = setting.format.render_calls("", [("now", {}), ("now", {})])
    matcher = setting.matcher(ToolChoice("required", parallel=False))
    assert not all(matcher.accept(token) for token in setting.ids(text)) or not matcher.is_completed()
    assert len(calls_in(setting.parse([text], ToolChoice("required", parallel=False)))) == 1


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_response_format_is_the_answer_or_a_call(settings_of, name):
    setting = settings_of(name)
    wanted = ResponseFormat("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    header = "<|channel|>final<|message|>" if name == "harmony" else ""
    for said, fits in ((header + '{"a": 1}', True), (header + "no", False)):
        matcher = setting.matcher(ToolChoice("auto"), response_format=wanted)
        assert (all(matcher.accept(token) for token in setting.ids(said)) and matcher.is_completed()) == fits


STRINGS = st.text(max_size=8) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "}{", '"', "\\", "\n", "]", ")", "[TOOL_CALLS]", "😀漢é", "a=1", "```", "</arg_key>", "'"]
)
VALUES = st.fixed_dictionaries(
    {"city": STRINGS, "days": st.integers(1, 99)},
    optional={
        "on": st.booleans(),
        "tags": st.lists(st.sampled_from(["a", "b", None, '</arg_value>"', "\\</parameter>\n"]), max_size=3),
        "unit": st.sampled_from(["c", "f"]),
        "where": st.fixed_dictionaries({"x": st.integers()}),
    },
)


def writable(name, arguments):
    """Strings without quotes cannot hold what ends them; strings that a tokenizer would read as control tokens are left out."""
    unquoted = {"qwen3_coder": "\n</parameter>", "glm": "</arg_value>", "glm47": "</arg_value>"}
    return unquoted.get(name, "\0\0") not in arguments["city"] and "\0" not in arguments["city"]


@st.composite
def cuts(draw, text):
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), made=st.lists(VALUES, min_size=1, max_size=2), before=st.sampled_from(["", "I look. ", "漢\n\n"]))
def test_calls_come_back_as_written_under_any_cut(name, data, made, before):
    made = [arguments for arguments in made if writable(name, arguments)]
    form = format_named(name)
    if not form.in_parallel:
        made = made[:1]
    if not made:
        return
    if not form.section.begin:
        before = ""
    calls = [("get_weather", arguments) for arguments in made]
    text = form.render_calls(before.rstrip(), calls)
    for pieces in ([text], list(text), data.draw(cuts(text))):
        deltas = Bare(form).parse(pieces)
        assert [(called, json.loads(arguments), complete) for called, arguments, complete in calls_in(deltas)] == [
            (called, arguments, True) for called, arguments in calls
        ]
        said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta | ReasoningDelta))
        assert said == before.rstrip()


class Bare(Setting):
    """A format alone."""

    def __init__(self, form):
        self.format = form


NOISE = {
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>function", "<｜tool▁sep｜>", "\n```json\n", "```<｜tool▁call▁end｜>"],
    "harmony": ["<|channel|>", "analysis", " to=functions.now", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"],
    "qwen3_coder": ["<function=now>", "<parameter=city>", "\n</parameter>", "</function>", "</parameter>"],
    "glm": ["<arg_key>", "days", "</arg_key>", "<arg_value>", "</arg_value>"],
    "glm47": ["<arg_key>", "days", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral": ["[ARGS]", "[TOOL_CALLS]now"],
    "pythonic": ["[", "now(", "city=", "'a\\'", "None", "1.5", ")", "True", "x", 'get_weather(days=[1, {"k": None}])'],
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_gives_the_same_deltas_under_any_cut(name, data):
    form = format_named(name)
    whole = form.render_calls("", [("get_weather", {"city": "é</x>", "days": 3})])
    common = ["<", "</", "\n", " ", "{", "}", "]", '"', ":", ",", "now", '{"name": "now", ', '"parameters": {', "😀", "1", "-"]
    extra = [*NOISE.get(name, []), form.section.begin or "["]
    fragments = st.sampled_from([*common, *extra, whole, whole[: len(whole) // 2], whole[len(whole) // 2 :]])
    text = "".join(data.draw(st.lists(fragments, max_size=10)))
    for choice in (ToolChoice("auto"), ToolChoice("auto", parallel=False)):
        deltas = Bare(form).parse([text], choice)
        calls_in(deltas)
        assert Bare(form).parse(text, choice) == deltas
        assert Bare(form).parse(data.draw(cuts(text)), choice) == deltas


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_call_that_is_cut_keeps_its_arguments_as_they_are(name):
    form = format_named(name)
    arguments = {"city": 'P"a\nris 😀', "days": 12, "on": True, "tags": ["a", None], "where": {"x": 1}}
    text = form.render_calls("", [("get_weather", arguments)])
    full = json.dumps(arguments, ensure_ascii=False)
    longest = 0
    for end in range(len(text)):
        deltas = Bare(form).parse([text[:end]])
        assert deltas == Bare(form).parse(text[:end])
        calls = calls_in(deltas)
        if not calls:
            continue
        ((called, written, complete),) = calls
        assert called == "get_weather"
        assert full.startswith(written) or form.name in ("glm", "qwen3_coder", "pythonic")
        if not complete:
            longest = max(longest, len(written))
        else:
            assert written == full
    assert longest > len(full) // 2


def test_pythonic_refuses_what_keywords_cannot_say():
    with pytest.raises(GrammarRefused, match="keyword arguments") as refused:
        format_named("pythonic").structural_tag([Tool("t", "", {"type": "object", "properties": {"a-b": {}}})], ToolChoice())
    assert refused.value.tool == "t"


def test_call_ids_are_what_templates_take():
    mistral = format_named("mistral")
    ids = {mistral.new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(made) == 9 and made.isalnum() for made in ids)
    assert mistral.history_id("abcdefgh1") == "abcdefgh1"
    assert mistral.history_id("call_1") == mistral.history_id("call_1") != mistral.history_id("call_2")
    assert len(mistral.history_id("call_1")) == 9
    assert format_named("hermes").history_id("call_1") == "call_1"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_other_special_token_can_stand_in_text_or_arguments(settings_of, name):
    setting = settings_of(name)
    special = {token for token, added in setting.tokenizer.get_added_tokens_decoder().items() if added.special}
    special -= set(setting.stops)
    begins = {"harmony": {"<|channel|>"}}.get(name, {setting.format.section.begin})
    markers = {setting.tokenizer.token_to_id(text) for text in begins if text}
    header = "<|channel|>final<|message|>" if name == "harmony" else ""
    for choice in (ToolChoice("auto"), ToolChoice("none")):
        matcher = setting.matcher(choice)
        assert special & set(setting.walker.allowed(matcher)) <= markers
        assert all(matcher.accept(token) for token in setting.ids(header + "Text, "))
        assert special & set(setting.walker.allowed(matcher)) <= (markers if choice.mode == "auto" else set())
        assert not any(matcher.accept(token) for token in special - markers)
    call = setting.format.render_calls("", [("get_weather", {"city": "Par"})])
    matcher = setting.matcher(ToolChoice("required"))
    assert all(matcher.accept(token) for token in setting.ids(setting.format.lead + call[: call.index("Par") + 3]))
    ends_the_value = {setting.tokenizer.token_to_id("</arg_value>")}
    assert special & set(setting.walker.allowed(matcher)) <= ends_the_value
