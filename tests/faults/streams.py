"""Streamed answers, read as a client reads them and held to what a whole answer must be; and what is asked for."""

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field

WORDS = ("river", "stone", "lantern", "copper", "window", "garden", "letter", "harbour", "winter", "candle", "mirror", "forest")
TRIES = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "pages": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
        "done": {"type": "boolean"},
    },
    "required": ["title", "pages", "done"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "maxLength": 24}, "count": {"type": "integer"}},
                "required": ["word", "count"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass
class Choice:
    content: str = ""
    reasoning: str = ""
    calls: dict = field(default_factory=dict)
    finish: str | None = None
    logprobs: list = field(default_factory=list)


@dataclass
class Answer:
    """All that a client got. Two are equal when the client could not tell them apart (ids of calls are new each time)."""

    choices: dict = field(default_factory=lambda: defaultdict(Choice))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: dict | None = None
    status: int = 200
    comments: int = 0
    turned_away: int = 0

    def said(self):
        return {
            index: (choice.content, choice.reasoning, tuple(choice.calls.values()), choice.finish, tokens_of(choice))
            for index, choice in sorted(self.choices.items())
        }, (self.prompt_tokens, self.completion_tokens)

    def equals(self, other):
        """The same text, calls, tokens, ends and usage; log-probabilities but for the last bits, in which a prompt computed at
        once and one computed token by token may differ."""
        if self.said() != other.said():
            return False
        pairs = [
            (mine[1], its[1])
            for index, choice in self.choices.items()
            for mine, its in zip(choice.logprobs, other.choices[index].logprobs, strict=True)
        ]
        return all(abs(mine - its) < 1e-3 for mine, its in pairs)

    @property
    def complete(self):
        return self.error is None and bool(self.choices) and all(choice.finish for choice in self.choices.values())


def tokens_of(choice):
    return [token for token, _ in choice.logprobs]


async def ask(session, url, body, headers=None, on_event=lambda answer: None, pace=0.0):
    """Streams one chat completion to its end. Whatever breaks the rules of a stream fails the test. As SDKs do, it tries again
    when it is turned away (502 or 503 with Retry-After, before the first byte). `pace`: seconds it takes for a line."""
    for turned_away in range(TRIES):
        answer, retry_after = await _ask_once(session, url, body, headers, on_event, pace)
        answer.turned_away = turned_away
        if answer.status not in (502, 503) or retry_after is None:
            break
        await asyncio.sleep(float(retry_after))
    return answer


async def _ask_once(session, url, body, headers, on_event, pace):
    answer = Answer()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url + "/v1/chat/completions", json=body, headers=headers or {}) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer, response.headers.get("Retry-After")
        over = False
        async for line in response.content:
            line = line.strip()
            if pace:
                await asyncio.sleep(pace)
            if line.startswith(b":"):
                answer.comments += 1
            if not line.startswith(b"data: "):
                continue
            assert not over, "an event came after the end"
            if line == b"data: [DONE]":
                over = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]
                continue
            take(answer, event)
            on_event(answer)
    assert over or answer.error, "the stream broke off"
    return answer, None


def take(answer, event):
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.completion_tokens = event["usage"]["completion_tokens"]
    for part in event["choices"]:
        choice, delta = answer.choices[part["index"]], part["delta"]
        assert choice.finish is None, "a choice went on after its end"
        choice.content += delta.get("content") or ""
        choice.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = choice.calls.get(call["index"], ("", ""))
            function = call.get("function", {})
            choice.calls[call["index"]] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
        if part.get("logprobs"):
            choice.logprobs += [(one["token"], one["logprob"]) for one in part["logprobs"]["content"]]
        choice.finish = part["finish_reason"] or choice.finish


async def ask_all(session, url, bodies, concurrency, on_answer=lambda number, answer: None):
    """Answers in order, `concurrency` streams at a time."""
    answers, places = [None] * len(bodies), asyncio.Semaphore(concurrency)

    async def one(number, body):
        async with places:
            answers[number] = await ask(session, url, body)
            on_answer(number, answers[number])

    async with asyncio.TaskGroup() as group:
        for number, body in enumerate(bodies):
            group.create_task(one(number, body))
    return answers


def prompt(number, dice):
    return f"Story {number}: " + " ".join(dice.choices(WORDS, k=dice.randint(5, 60)))


def plain_ask(number, dice, max_tokens):
    """Greedy or seeded, some with several choices, stop strings, a floor of tokens."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt(number, dice)}],
        "max_tokens": dice.randint(max_tokens // 2, max_tokens),
        "temperature": 0.0,
    }
    if number % 2:
        body |= {"temperature": 1.0, "seed": number}
    if number % 5 == 0:
        body["n"] = 2
    if number % 7 == 0:
        body["stop"] = ["e st", "an o", " th", "ing "]
        body["min_tokens"] = 8
    return body


def model_ask(number, dice, max_tokens):
    """For workers with a model: the same, and grammars for answers and calls, logprobs, penalties."""
    body = plain_ask(number, dice, max_tokens)
    kind = number % 4
    if kind == 1:
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}}}
    elif kind == 2:
        body |= {"tools": TOOLS, "tool_choice": "required"}
    elif kind == 3:
        body |= {"logprobs": True, "presence_penalty": 0.8, "repetition_penalty": 1.1}
    if kind in (1, 2):
        body.pop("stop", None)
    return body
