"""A conversation as an agent leads it, with a builder that makes its prompts and the ledgers that come of them."""

import msgspec

from gateway.histories.builder import HistoryBuilder
from gateway.histories.pending import Said, pending_from
from gateway.turn import SessionRef, Turn
from grammar.tools import Tool
from prefix_cache.hashing import block_digests, unpack_tokens

ROOT = bytes(16)
TOOLS = (
    Tool("search", "Finds things", {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "number"}}}),
    Tool("read", None, {"type": "object", "properties": {}}),
)


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def called(*calls, content=None):
    """An assistant's message with calls: (name, arguments), or (name, arguments, id)."""
    message = {"role": "assistant"} if content is None else {"role": "assistant", "content": content}
    message["tool_calls"] = [
        {
            "type": "function",
            "id": call[2] if len(call) > 2 else f"call{at:05d}",
            "function": {"name": call[0], "arguments": call[1]},
        }
        for at, call in enumerate(calls)
    ]
    return message


def result(text, call_id="call00000"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


class Agent:
    """Sends turns of one conversation, keeping its branches as a session does."""

    def __init__(self, model, **settings):
        self.model = model
        self.builder = HistoryBuilder(model, **settings)
        self.branches = []

    def turn(self, *messages, tools=(), **kwargs):
        return Turn("r", self.model.name, SessionRef("", None), tuple(messages), tools=tools, template_kwargs=kwargs)

    def send(self, *messages, tools=(), root=ROOT, block_size=4, **kwargs):
        """The continuation of a turn; the branch it makes is kept."""
        turn = self.turn(*messages, tools=tools, **kwargs)
        text = self.builder.describe(turn)
        match = self.builder.match(text, self.branches, root, turn.messages)
        made = self.builder.build(turn, text, match, root=root, block_size=block_size, max_tokens=10**6)
        assert b"".join(block_digests(made.ledger.tokens.whole(), root, block_size)) == made.ledger.blocks
        check_spans(made.ledger)
        self.branches = [made.ledger, *self.branches][:4]
        return made

    def answer(self, message, ids, *, cut=False):
        """What the model generated for the last turn: `ids`, returned to the client as `message`; `cut` by max_tokens."""
        pending = pending_from(self.branches[0], [Said(message, ids, cut)])
        self.branches[0] = msgspec.structs.replace(self.branches[0], pending=pending)

    def reference(self, *messages, tools=(), **kwargs):
        """The ids that rendering and tokenising everything gives."""
        text = self.model.renderer.render(messages, tools, template_kwargs=kwargs)
        return self.model.tokenizer.encode(text, add_special_tokens=False)

    def ids(self, text):
        return self.model.tokenizer.encode(text, add_special_tokens=False)

    def odd_ids(self, text):
        """Ids of a text that its tokenizer would not choose: one for each character it can be cut into."""
        ids = [one for character in text for one in self.ids(character)]
        assert self.model.tokenizer.decode(ids) == text
        assert ids != self.ids(text)
        return ids


def prompt_ids(continuation):
    return unpack_tokens(continuation.ledger.tokens.whole()).tolist()


def check_spans(ledger):
    """Spans go forwards and end within the prompt."""
    last = (0, 0, 0)
    for span in ledger.iter_spans():
        here = (span.messages, span.tokens, span.text_bytes)
        assert all(new >= old for new, old in zip(here, last, strict=True))
        assert here[0] > last[0]
        last = here
    assert last[0] <= ledger.num_messages
    assert last[1] <= ledger.num_tokens
