"""Text to token ids and back, by the `tokenizers` library alone: loads in milliseconds, and releases the GIL while it works.

The ids are those of transformers' fast tokenizers for the same directory (tests compare them): rendered chat templates are
encoded without special tokens, because templates write their own BOS; plain prompts are encoded with those that the
post-processor of tokenizer.json adds (add_bos_token in tokenizer_config.json counts for nothing beside it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from gateway.word_memo import WordMemo

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TEMPLATE_BYTES = 4 * 2**20


class ModelFilesError(Exception):
    """A model directory from which text cannot be tokenised or rendered. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a Hugging Face directory says about text, read once.

    `special_tokens` holds the named ones (bos_token, ...) as chat templates see them; `chat_templates` the templates by
    name, `default` first in meaning ({}: the model has none); `sampling_defaults` the sampling fields of
    generation_config.json and `eos_token_ids` the tokens that end a generation by the same file.
    """

    directory: Path
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    sampling_defaults: Mapping[str, float]
    eos_token_ids: tuple[int, ...] = ()


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads tokenizer_config.json, special_tokens_map.json, chat_template.jinja, chat_templates/ and
    generation_config.json of `directory`. Only tokenizer.json must exist. Raises ModelFilesError."""
    if not (directory / "tokenizer.json").is_file():
        raise ModelFilesError(
            f"{directory} has no tokenizer.json. Give a directory with a fast tokenizer "
            "(transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    config = _read_json(directory / "tokenizer_config.json")
    special = {**_read_json(directory / "special_tokens_map.json"), **config}
    generation = _read_json(directory / "generation_config.json")
    tokens = {name: text for name in NAMED_TOKENS if (text := _token_text(special.get(name))) is not None}
    return TokenizerFiles(
        directory=directory,
        special_tokens=MappingProxyType(tokens),
        chat_templates=MappingProxyType(_chat_templates(directory, config.get("chat_template"))),
        sampling_defaults=MappingProxyType(_sampling_defaults(generation)),
        eos_token_ids=_token_ids(generation.get("eos_token_id")),
    )


class TextTokenizer:
    """One tokenizer. Immutable after construction, so safe to share between threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        path = files.directory / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelFilesError(f"{path} cannot be read as a tokenizer: {error}. Fetch the file again.") from error
        backend.no_truncation()
        backend.no_padding()
        missing = [text for text in files.special_tokens.values() if backend.token_to_id(text) is None]
        if missing:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
        self._files = files
        self._backend = backend
        self._memo = WordMemo.of(backend)
        eos = files.special_tokens.get("eos_token")
        named = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids: frozenset[int] = frozenset((*files.eos_token_ids, *(() if named is None else (named,))))
        self._size = int(backend.get_vocab_size(with_added_tokens=True))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.longest_token: int = max(map(len, vocabulary), default=1)
        ids = sorted(vocabulary.values())
        # Below it, every id is one of a token; of all but a few vocabularies it is their end.
        self._gapless = next((at for at, token_id in enumerate(ids) if at != token_id), len(ids))

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """The tokenizer of a model directory. Raises ModelFilesError."""
        return cls(read_tokenizer_files(directory))

    @property
    def files(self) -> TokenizerFiles:
        """What the directory says beside the vocabulary."""
        return self._files

    @property
    def backend(self) -> Tokenizer:
        """The library's tokenizer, for the incremental detokeniser. Must not be changed."""
        return self._backend

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Releases the GIL: call it from a thread for long texts.

        Raises ValueError for text that is no valid Unicode (lone surrogates).
        """
        try:
            # Without the offsets that nobody asks for, it takes a fifth less.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("the text holds half of a surrogate pair, which is no character") from error
        return ids

    def encode_packed(self, text: str, *, add_special_tokens: bool) -> bytes:
        """As `encode`, packed as little-endian uint32."""
        if self._memo is not None and not add_special_tokens:
            packed = self._memo.encode(text)
            if packed is not None:
                return packed
        return np.asarray(self.encode(text, add_special_tokens=add_special_tokens), dtype="<u4").tobytes()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`. Raises ValueError for an id that is not in the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self._gapless:
            for token_id in ids:
                if not 0 <= token_id <= 0xFFFFFFFF or self._backend.id_to_token(token_id) is None:
                    raise ValueError(f"{token_id} is not in the vocabulary of {self.size} tokens")
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token alone, as text (replacement characters where it is part of a character); "" for an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        # Decoders of SentencePiece vocabularies drop the space before a text's first word.
        return " " + text if token.startswith("\u2581") and not text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for. For byte-level vocabularies exact also within a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        text = self.token_text(token_id)
        if "\ufffd" in text and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return text.encode("utf-8", "replace")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters, inverted: what byte-level vocabularies are written in."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    mapping = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    mapping.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return mapping


_BYTE_OF: Mapping[str, int] = MappingProxyType(_byte_level_alphabet())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}. Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} must hold a JSON object. Fetch the file again.")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _chat_templates(directory: Path, configured: object) -> dict[str, str]:
    """Templates by name. Files overrule tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    main = directory / "chat_template.jinja"
    if main.is_file():
        templates["default"] = _read_template(main)
    folder = directory / "chat_templates"
    if folder.is_dir():
        templates.update({path.stem: _read_template(path) for path in sorted(folder.glob("*.jinja"))})
    if templates:
        return templates
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        for entry in configured:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
                templates[entry["name"]] = entry["template"]
    return templates


def _read_template(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise ModelFilesError(f"{path} has {len(data)} bytes; a chat template may have {_MAX_TEMPLATE_BYTES}.")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read as a chat template: {error}.") from error


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Sampling fields a model's authors recommend. transformers ignores them unless do_sample is set; so does this."""
    if config.get("do_sample") is not True:
        return {}
    found: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found
