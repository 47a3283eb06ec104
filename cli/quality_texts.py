"""What `turnkeep bench quality` reads: the bundled text, and agent sessions as the model's chat template writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.checkpoints import CheckpointError
from engine.quality.texts import bundled_text
from gateway.apis.openai.messages import Message, normalise
from gateway.apis.openai.tools import parse_tools
from gateway.config import ModelConfig
from gateway.models import ServedModel
from gateway.tokenization import ModelFilesError
from gateway.turn import TurnError
from traces.format import read_lines
from traces.history import rebuild
from traces.record_samples import BUNDLED

SESSIONS = ("engineer-triage", "support-espresso", "analyst-stock")
"""Bundled trajectories that are read beside the text: one of each kind of agent."""


def texts_for(directory: Path, name: str) -> list[list[int]]:
    """Token ids of the bundled text and of the sessions, each with its last answer.

    Sessions that the chat template does not take, and all where there is none, are left out. Raises CheckpointError when the
    tokenizer cannot be read.
    """
    try:
        model = ServedModel.load(ModelConfig(name, directory))
    except ModelFilesError as error:
        raise CheckpointError(str(error)) from error
    texts = [bundled_text(), *(_transcripts(model) if model.renderer.has_template else ())]
    return [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _transcripts(model: ServedModel) -> Iterator[str]:
    for session in SESSIONS:
        *_, last = rebuild(line for _, line in read_lines(BUNDLED / f"{session}.jsonl"))
        messages = msgspec.convert([*last.messages, last.line.assistant], list[Message])
        try:
            yield model.renderer.render(normalise(messages, []), parse_tools(list(last.tools), []), add_generation_prompt=False)
        except TurnError:
            continue
