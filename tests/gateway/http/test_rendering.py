"""Rendered prompts against transformers' apply_chat_template, and what the renderer does where a template cannot."""

import json
from datetime import datetime

import pytest
from chat_template_texts import GEMMA, HERMES_3, LLAMA_3, MISTRAL, QWEN_2_5, QWEN_3, STRING_ARGUMENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.chat_templates import ChatTemplate, TemplateRefusal
from gateway.rendering import ChatRenderer, tool_dict
from gateway.turn import TurnError
from grammar.formats.registry import format_for
from grammar.tools import Tool

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = (
    Tool("get_weather", "Weather & more", {"type": "object", "properties": {"city": {"type": "string", "description": "Ü"}}}),
    Tool("now"),
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"qwen2.5": QWEN_2_5, "qwen3": QWEN_3, "llama3": LLAMA_3, "mistral": MISTRAL, "hermes3": HERMES_3}


def call(name, arguments, call_id="abc123def"):
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|> & < > ' \""}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b "},
        {"role": "user", "content": " c\n"},
    ],
    "tools": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [call("get_weather", {"city": "São Paulo", "days": [1, 2]})]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "thanks"},
    ],
}


def renderer(template, **kwargs):
    return ChatRenderer({"default": template}, SPECIAL, format_for(template), model="m", **kwargs)


def reference(template, messages, tools=(), add_generation_prompt=True, **kwargs):
    rendered, _ = render_jinja_template(
        [messages],
        tools=[tool_dict(tool) for tool in tools] or None,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **{**SPECIAL, **kwargs},
    )
    return rendered[0]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(template, conversation, tools, add_generation_prompt):
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    rendered = renderer(source).render(messages, tools, add_generation_prompt=add_generation_prompt)
    assert rendered == reference(source, messages, tools, add_generation_prompt)


def test_template_kwargs_reach_the_template():
    messages = CONVERSATIONS["one"]
    for thinking in (True, False):
        rendered = renderer(QWEN_3).render(messages, template_kwargs={"enable_thinking": thinking})
        assert rendered == reference(QWEN_3, messages, enable_thinking=thinking)
    assert renderer("{{ a }}{{ bos_token }}").render(messages, template_kwargs={"a": 1, "bos_token": "B"}) == "1B"


def test_reasoning_is_handed_over_as_in_transformers():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "assistant", "content": "c", "reasoning_content": "again"},
    ]
    assert renderer(QWEN_3).render(messages) == reference(QWEN_3, messages)
    assert "because" in renderer("{{ messages[1].thinking }}").render(messages)


def test_traits_are_found_by_trying():
    for template in TEMPLATES.values():
        traits = renderer(template).traits()
        assert traits.shows_tools
        assert traits.renders_calls
        assert not traits.arguments_as_text
    plain = renderer(CHATML).traits()
    assert not plain.shows_tools
    assert not plain.renders_calls
    assert renderer(STRING_ARGUMENTS).traits().arguments_as_text


def test_templates_that_want_json_text_get_it():
    rendered = renderer(STRING_ARGUMENTS).render(CONVERSATIONS["tools"], TOOLS)
    assert '{"city": "São Paulo", "days": [1, 2]}' in rendered


def test_a_template_without_tools_gets_a_hermes_prompt_and_history():
    rendered = renderer(CHATML).render(CONVERSATIONS["tools"], TOOLS)
    assert rendered.startswith("<|im_start|>system\nbe brief\n\n# Tools")
    assert '"name": "get_weather"' in rendered
    assert (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "São Paulo", "days": [1, 2]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    ) in rendered
    without_system = renderer(CHATML).render(CONVERSATIONS["one"], TOOLS)
    assert without_system.startswith("<|im_start|>system\n# Tools")
    # Without tools the history is rendered the same way, so that the prefix stays.
    assert "<tool_call>" in renderer(CHATML).render(CONVERSATIONS["tools"])


def test_a_plain_conversation_is_what_transformers_renders():
    for messages in ("one", "system", "turns"):
        assert renderer(CHATML).render(CONVERSATIONS[messages]) == reference(CHATML, CONVERSATIONS[messages])


def test_results_of_parallel_calls_are_one_message():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so:", "tool_calls": [call("now", {}), call("now", {"a": 1}, "d")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    rendered = renderer(CHATML).render(messages)
    assert rendered.count("<|im_start|>user") == 2
    assert "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>" in rendered
    assert '<|im_start|>assistant\nso:\n<tool_call>\n{"name": "now", "arguments": {}}' in rendered


def test_developer_messages():
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert "<|im_start|>system\nx" in renderer(CHATML).render(messages)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
    assert renderer(knows).render(messages) == "Dxy"


def test_a_second_template_for_turns_with_tools():
    both = ChatRenderer(
        {"default": CHATML, "tool_use": QWEN_2_5, "rag": "{{ nothing"}, SPECIAL, format_for(QWEN_2_5), model="m"
    )
    messages = CONVERSATIONS["one"]
    assert both.render(messages) == reference(CHATML, messages)
    assert both.render(messages, TOOLS) == reference(QWEN_2_5, messages, TOOLS)


def test_a_template_that_raises_is_a_sentence():
    with pytest.raises(TurnError) as caught:
        renderer(GEMMA).render(CONVERSATIONS["system"])
    assert caught.value.status == 400
    assert caught.value.message == "The chat template of 'm' does not take this conversation: System role not supported."
    with pytest.raises(TurnError, match="not take"):
        renderer("{{ messages[0]['content'] + 1 }}").render(CONVERSATIONS["one"])


def test_a_template_that_is_wrong_is_found_at_the_start():
    with pytest.raises(ValueError, match=r"'default' of m is not valid, line 2"):
        renderer("fine\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set x = namespace(_a=1) %}{{ x }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
    ],
)
def test_the_sandbox_holds(source):
    template = ChatTemplate(source)
    try:
        assert template.render({"messages": []}) in ("", "None")
    except TemplateRefusal:
        pass


def test_filters_and_extensions():
    now = datetime(2026, 11, 30, 12, 0)
    render = lambda source, **variables: ChatTemplate(source, now=lambda: now).render(variables)  # noqa: E731
    assert render("{{ strftime_now('%d %b %Y') }}") == "30 Nov 2026"
    assert render("{{ x | tojson }}", x={"a": "<ü>"}) == '{"a": "<ü>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == json.dumps([1], indent=1)
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ x }}{% endgeneration %}c", x=1) == "ab1c"
    assert render("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ dict(a=1).a }}") == "21"


text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


@settings(max_examples=80, deadline=None)
@given(
    template=st.sampled_from([QWEN_2_5, QWEN_3, LLAMA_3, CHATML]),
    system=st.none() | text,
    turns=st.lists(st.tuples(text, text), max_size=4),
    last=text,
)
def test_random_conversations(template, system, turns, last):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    messages.append({"role": "user", "content": last})
    assert renderer(template).render(messages) == reference(template, messages)
