"""A client whose model generates freely, and which sends back what it got in its own way, as real clients do: arguments
re-serialised with sorted keys, white space trimmed, reasoning dropped."""

import json
from dataclasses import dataclass, field

BLOCK = 16


@dataclass
class Reuse:
    """Whole blocks of history (prompts and answers before), and how many of them the next prompt began with. `cut`: turns after
    an answer that max_tokens ended within a call. Its ids would leave the call open, so it comes back as the template writes
    it; those turns are counted here and nowhere else."""

    turns: int = 0
    blocks: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost: list = field(default_factory=list)
    cut: int = 0

    @property
    def share(self):
        return self.kept / self.blocks if self.blocks else 1.0


class FreeAgent:
    """One conversation. `post(body)` sends a chat completion and returns its parsed answer."""

    def __init__(self, post, reuse, **settings):
        self._post = post
        self._settings = settings
        self.reuse = reuse
        self.messages = []
        self.history = None
        self.cut = False

    def turn(self, *messages, **settings):
        """Sends these new messages; what is generated joins the conversation. Returns the answer's message."""
        self.messages += messages
        answer = self._post({"messages": self.messages, "return_token_ids": True, **self._settings, **settings})
        prompt = answer["prompt_token_ids"]
        if self.cut:
            self.reuse.cut += 1
        elif self.history is not None:
            # The last token's KV is computed only when another follows, so the block it ends is not counted on.
            whole = (len(self.history) - 1) // BLOCK
            same = 0
            while same < whole and prompt[same * BLOCK : (same + 1) * BLOCK] == self.history[same * BLOCK : (same + 1) * BLOCK]:
                same += 1
            self.reuse.turns += 1
            self.reuse.blocks += whole
            self.reuse.kept += same
            self.reuse.prompt_tokens += len(prompt)
            self.reuse.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if same < whole:
                self.reuse.lost.append((len(self.messages), whole - same))
        choice = answer["choices"][0]
        self.cut = choice["finish_reason"] == "length" and bool(choice["message"].get("tool_calls"))
        self.history = [*prompt, *choice["token_ids"]]
        self.messages.append(_as_clients_do(choice["message"]))
        return self.messages[-1]


def _as_clients_do(message):
    back = {"role": "assistant", "content": (message.get("content") or "").strip()}
    if message.get("tool_calls"):
        back["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _sorted(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return back


def _sorted(arguments):
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except json.JSONDecodeError:
        return arguments  # it was cut
