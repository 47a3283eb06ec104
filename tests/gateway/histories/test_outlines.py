"""Outlines give what rendering gives, whatever a template does with the texts of messages."""

import pytest
from agents import TOOLS, called, result, said, system, user
from hypothesis import given, settings
from hypothesis import strategies as st
from test_builder_property import histories

from gateway.histories.pieces import PieceRenderer
from gateway.histories.skeleton import STAND_IN
from gateway.outlines.outline import Outlines
from gateway.rendering import ChatRenderer
from gateway.turn import TurnError
from grammar.formats.registry import format_named

NAMES = ["smollm2", "qwen2.5", "qwen3", "llama3", "mistral", "hermes3", "gemma", "strings"]


class Counting(Outlines):
    """Counts what was filled in and what was rendered."""

    def __init__(self, renderer):
        super().__init__(renderer, STAND_IN)
        self.found = self.missed = 0

    def find(self, wanted):
        text = super().find(wanted)
        self.found += text is not None
        self.missed += text is None
        return text


def both(renderer, tools=(), outlines=None):
    """A PieceRenderer with outlines, and one without."""
    outlines = outlines or Counting(renderer)
    return PieceRenderer(renderer, tools, {}, outlines, "scope"), PieceRenderer(renderer, tools, {}), outlines


def parts(pieces, messages, most=2):
    for start in range(1, len(messages)):
        for end in range(start + 1, min(start + most, len(messages)) + 1):
            for prompt in (False, True):
                yield start, end, prompt, pieces.part(messages, start, end, prompt=prompt)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_that_are_rendered(family_model, name):
    renderer = family_model(name).renderer
    kept = Counting(renderer)

    @settings(max_examples=10, deadline=None)
    @given(histories())
    def check(turns):
        messages, tools = turns[-1]
        filled, rendered, _ = both(renderer, tools, kept)
        expected = list(parts(rendered, messages))
        for _ in range(2):
            assert list(parts(filled, messages)) == expected

    check()
    assert kept.found


@pytest.mark.parametrize("name", NAMES)
def test_what_agents_send_is_rendered_once_and_filled_in_from_then_on(family_model, name):
    renderer = family_model(name).renderer
    texts = [f"text {number} that is long enough to be shortened" * 3 for number in range(6)]

    def conversation(at):
        messages = [] if name in ("gemma", "mistral") else [system("be brief " + texts[at])]
        messages += [user(texts[at]), said(texts[at - 1]), user(texts[at - 2])]
        call = called(("search", {"q": texts[at], "n": at}, f"id{at:07d}"), content=None)
        return [*messages, call, result(texts[at], f"id{at:07d}"), said(texts[at]), user("and " + texts[at])]

    filled, rendered, outlines = both(renderer, TOOLS)
    found = 0
    for at in range(6):
        messages = conversation(at)
        turns = [(len(messages) - 6, len(messages) - 4), (len(messages) - 4, len(messages) - 2)]
        for start, end in [*turns, (len(messages) - 2, len(messages))]:
            outlines.found = 0
            text = filled.part(messages, start, end, prompt=True)
            assert text == rendered.part(messages, start, end, prompt=True)
            # What cannot be said without the messages before it has no outline.
            assert at < 2 or outlines.found == (text is not None), (at, start, end)
            found += outlines.found
    assert found >= (0 if name in ("gemma", "strings") else 4)


LOOKS = [
    "{{ c | upper }}",
    "{{ c[:2] }}",
    "{{ c[0] }}",
    "{{ c | length }}",
    "{{ c.split('a')[0] }}",
    "{{ c | replace('a', 'b') }}",
    "{{ 'x' if 'a' in c }}",
    "{{ 'x' if c in 'abc' }}",
    "{{ 'x' if c in ['a', 'b'] }}",
    "{{ c == 'a' }}{{ 'a' != c }}",
    "{{ c ~ '!' }}",
    "{% set x = c ~ 'q' %}{{ 'Q' if 'aq' in x }}{{ x }}",
    "{% set x = c + 'q' %}{{ x | length }}",
    "{% set x %}{{ c }}{% endset %}{{ x | length }}",
    "{% filter upper %}{{ c }}{% endfilter %}",
    "{{ 'a' ~ c ~ 1 }}",
    "{{ '%s' | format(c) }}",
    "{{ '%s' % c }}",
    "{{ '{}'.format(c) }}",
    "{{ [c, 'a'] | join('-') }}",
    "{{ 'a'.join([c]) }}",
    "{% macro m(t) %}[{{ t }}]{% endmacro %}{% set y = m(c) %}{{ y | length }}{{ y }}",
    "{% macro m(t) %}{{ t }}{% endmacro %}{{ m(c) | trim }}|{{ 'A' if m(c) == 'a' }}",
    "{{ {'a': 'b'}[c] }}",
    "{{ message | tojson }}",
    "{{ c | tojson }}",
    "{{ [c, {'k': c + 'z'}] | tojson(indent=1) }}",
    "{% for letter in c %}{{ letter }}.{% endfor %}",
    "{{ messages | map(attribute='content') | join(',') }}",
    "{{ c | trim | length }}",
    "{{ c | trim }}{{ c.strip() }}{{ c.lstrip('a') }}{{ c.rstrip('b') }}",
    "{{ c * 2 }}",
    "{{ c is in ['a', 'b'] }}",
    "{{ c < 'b' }}",
    "{{ c | default('x', true) }}",
    "{{ c.replace('a', 'b') }}",
    "{{ (c, 1) }}",
    "{{ c | string | length }}",
    "{{ c | e }}",
    "{{ c | safe }}",
    "{{ c | first }}",
    "{{ loop.changed(c) }}",
    "{{ c or 'e' }}",
    "{{ c is string and c is iterable and c is sequence }}",
    "{{ c is mapping }}{{ c is none }}{{ c is defined }}{{ c is number }}",
    "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
    "{{ namespace(x=c).x }}",
    "{{ dict(x=c).x }}",
    "{{ c.number }}{{ c.written }}{{ c.trace }}",
    "{{ message.get('content') }}",
    "{{ message['content'] }}",
    "{{ not c }}",
    "{{ c.startswith('a') }}{{ c.endswith('b') }}",
    "{{ c.startswith(('a', 'b')) }}",
    "{{ 'abc'.startswith(c) }}",
    "{{ c | int }}",
    "{{ c | list }}",
    "{{ c | reverse }}",
    "{{ messages | map(attribute='content') | unique | list | length }}",
    "{{ messages | sort(attribute='content') | map(attribute='role') | list }}",
    "{{ c.isalpha() }}",
    "{{ c is lower }}",
    "{{ raise_exception(c) if c == 'ab' }}",
    "{{ c if loop.first else (c | trim) }}",
    "{{ ('<' + c) | trim }}",
    "{{ c.foo is defined }}",
    "{{ c | length > 1 and c }}",
    "{{ message.items() | list }}",
    "{{ message | items | list }}",
    "{{ c | wordcount }}",
    "{% generation %}{{ c }}{% endgeneration %}",
    "{% set ns = namespace(t='') %}{% set ns.t = ns.t + c %}{{ ns.t }}{{ ns.t == 'a' }}",
    "{{ message.tool_calls is defined }}",
    "{{ c is eq 'a' }}",
    "{{ c is sameas 'a' }}",
    "{{ range(c | length) | list }}",
]
CONTENTS = st.sampled_from(["", "a", "b", " a ", "ab", "abc", "aq", "x<y", '"q"\n', "zé 🙂", "\ue0f10\ue0f2", "1", "3", "  "])


@pytest.mark.parametrize("look", LOOKS)
def test_a_template_that_looks_into_texts_is_not_believed_to_be_blind(look):
    source = "{% for message in messages %}{% set c = message.content %}<{{ message.role }}>" + look + "{% endfor %}"
    renderer = ChatRenderer({"default": source}, {}, format_named("hermes"), model="m")
    kept = Counting(renderer)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(CONTENTS, min_size=2, max_size=3))
    def check(contents):
        messages = [user(text) if at % 2 == 0 else said(text) for at, text in enumerate(contents)]
        filled, rendered, _ = both(renderer, outlines=kept)
        assert list(parts(filled, messages)) == list(parts(rendered, messages))

    check()


ARGUMENTS = [
    "{{ a | tojson }}",
    "{{ a }}",
    "{{ a.q }}",
    "{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}",
    "{{ a | items | list }}",
    "{{ call | tojson }}",
    "{{ call.function | tojson }}",
    "{{ 'empty' if not a }}",
    "{{ a is mapping }}{{ a is string }}",
    "{{ a | length }}",
    "{{ a == {'q': 1} }}",
    "{{ 'q' in a }}",
    "{{ a | string }}",
    "{{ a is iterable }}",
    "{{ a['q'] is defined }}",
    "{{ a | dictsort }}",
    "{{ call.id | length }}{{ call.id }}",
    "{{ call.function.name }}",
    "{{ message.tool_calls | tojson }}",
    "{{ '{\"q\":' in (a | tojson) }}",
    "{{ a | tojson | length }}",
    "{{ a | tojson | trim }}",
]


@pytest.mark.parametrize("look", ARGUMENTS)
def test_arguments_of_calls_are_written_and_not_looked_into(look):
    source = (
        "{% for message in messages %}<{{ message.role }}>{% if message.content %}{{ message.content }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{% set a = call.function.arguments %}[" + look + " "
        "{{ call.function.name }} {{ a | tojson }}]{% endfor %}{% endfor %}"
    )
    renderer = ChatRenderer({"default": source}, {}, format_named("hermes"), model="m")
    kept = Counting(renderer)
    arguments = st.dictionaries(st.sampled_from(["q", "n"]), st.sampled_from([1, 1.0, True, "a", None, [1], 2**70]), max_size=2)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(arguments, min_size=1, max_size=2), st.sampled_from(["a", "call00001"]))
    def check(given_arguments, name):
        message = called(*[("f", each, name) for each in given_arguments])
        messages = [user("u"), message, result("r", name), said("x")]
        filled, rendered, _ = both(renderer, outlines=kept)
        assert list(parts(filled, messages)) == list(parts(rendered, messages))

    check()


def test_templates_that_only_write_texts_have_outlines():
    for look in (
        "{{ c }}",
        "{{ c | trim }}",
        "{{ '<' + c + '>' }}",
        "{{ 'a' ~ c }}",
        "{% generation %}{{ c }}{% endgeneration %}",
    ):
        source = "{% for message in messages %}{% set c = message.content %}" + look + "{% endfor %}"
        filled, rendered, outlines = both(ChatRenderer({"default": source}, {}, format_named("hermes"), model="m"))
        for text in ("a", " b ", "c" * 100):
            messages = [user(text), said(text), user(text)]
            assert filled.part(messages, 1, 3) == rendered.part(messages, 1, 3)
        assert (outlines.found, outlines.missed) == (2, 1), look


def test_what_is_kept_is_bounded(family_model):
    renderer = family_model("qwen2.5").renderer
    filled, rendered, outlines = both(renderer)
    for number in range(600):
        message = {"role": "user", "content": "a", f"key{number}": 1}
        assert filled.part([user("u"), message], 1, 2) == rendered.part([user("u"), message], 1, 2)
    assert len(outlines._families) == 512


def test_a_template_without_a_model_is_no_matter():
    with pytest.raises(TurnError, match="no chat template"):
        both(ChatRenderer({}, {}, format_named("hermes"), model="m"))[0].whole([user("a")])
