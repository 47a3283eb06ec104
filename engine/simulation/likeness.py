"""What a simulated replica takes over from a model on disk: its sizes, its end tokens, and ids its tokenizer can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.checkpoints.catalog import read_json
from engine.checkpoints.errors import CheckpointError
from engine.simulation.config import LETTER_TOKENS
from engine.simulation.tokens import harmless_tokens


@dataclass(frozen=True, slots=True)
class Likeness:
    """`max_model_len` None: config.json does not say. `tokenizer` None: the model has no tokenizer.json."""

    vocab_size: int
    max_model_len: int | None
    eos_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None


def likeness_of(model: Path) -> Likeness:
    """Reads a Hugging Face directory; no weights are touched. Raises CheckpointError."""
    config = read_json(model / "config.json")
    text_config = config.get("text_config")
    sizes = text_config if isinstance(text_config, dict) else config
    generation = read_json(model / "generation_config.json") if (model / "generation_config.json").exists() else {}
    tokenizer = _tokenizer(model / "tokenizer.json")
    vocab_size = _integer(sizes, "vocab_size")
    if vocab_size is None:
        if tokenizer is None:
            raise CheckpointError(f"{model / 'config.json'} has no vocab_size; give another model, or none.")
        vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    eos = generation.get("eos_token_id", config.get("eos_token_id", sizes.get("eos_token_id")))
    eos_token_ids = tuple(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))
    token_ids = () if tokenizer is None else tuple(token for token in harmless_tokens(tokenizer) if token < vocab_size)
    return Likeness(
        vocab_size=vocab_size,
        max_model_len=_integer(sizes, "max_position_embeddings"),
        eos_token_ids=tuple(token for token in eos_token_ids if 0 <= token < vocab_size),
        token_ids=token_ids or tuple(token for token in LETTER_TOKENS if token < vocab_size) or (0,),
        tokenizer=tokenizer,
    )


def _integer(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}. Fetch the model again.") from error
