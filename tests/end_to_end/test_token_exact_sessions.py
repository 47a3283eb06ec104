"""A session keeps the very ids that the model generated, through both replicas, the real tokenizer and a careless client."""

import pytest
from free_agent import FreeAgent, Reuse
from tokenizers import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a book up",
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string", "maxLength": 20}, "shelf": {"enum": ["history", "poems", "travel"]}},
                "required": ["title", "shelf"],
            },
        },
    }
]


@pytest.mark.parametrize("named", [True, False], ids=["named", "by prefix"])
def test_all_whole_blocks_of_the_history_are_reused(web, smollm2_dir, named):
    headers = {"Session-ID": "token-exact"} if named else {}

    def post(body):
        reply = web.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    reuse = Reuse()
    agent = FreeAgent(post, reuse, model="smollm2", temperature=1.6, seed=7 + named, max_tokens=24)
    agent.turn(
        {"role": "system", "content": f"You keep a library ({named}). " + "Be kind to every reader. " * 20},
        {"role": "user", "content": "Tell me of a book."},
    )
    answers = [agent.history]
    for number in range(2):
        message = agent.turn({"role": "user", "content": f"And another, number {number}?"})
        answers.append(agent.history)
    for step in range(1):
        # One call, and less wild than the answers: one that max_tokens cut would not be spliced.
        message = agent.turn(
            {"role": "user", "content": f"Look it up ({step})."},
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=160,
            temperature=0.5,
        )
        for call in message.get("tool_calls", ()):
            agent.turn({"role": "tool", "tool_call_id": call["id"], "content": "It is there."}, tools=TOOLS, tool_choice="none")
    assert reuse.turns + reuse.cut >= 3
    # Turns with tools begin anew once: the tools are written before everything else.
    losses = [at for at, _ in reuse.lost]
    assert len(losses) <= 1, reuse.lost
    # And this was worth testing: the tokenizer would have chosen other ids for the text.
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    generated = answers[-1]
    again = tokenizer.encode(tokenizer.decode(generated, skip_special_tokens=False), add_special_tokens=False).ids
    assert again != generated
    if named:
        cached = web.get("/v1/sessions/token-exact").json()
        assert cached["tokens"]["spliced"] > 0
