"""Text to token ids and back, with the `tokenizers` library alone: `transformers` would cost the front process 50 MB."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from holdfast.errors import ModelLoadError
from holdfast.parsing.pieces import TokenPieces

_CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A model's tokenizer with its special tokens. Immutable after it is built; may be used from several threads."""

    def __init__(self, backend: Backend, *, config: Mapping[str, Any], eos_token_ids: Sequence[int] = ()) -> None:
        """config: tokenizer_config.json. eos_token_ids: those that the model's own files name."""
        backend.no_truncation()  # some files were saved with the truncation and padding of their training
        backend.no_padding()
        self._backend = backend
        self.special_tokens = named_special_tokens(config)
        add_missing_tokens(backend, config, self.special_tokens)
        self.pieces = TokenPieces(backend)
        self.vocab_size = _vocab_size(backend)
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        named = {*eos_token_ids, *(() if eos is None else (eos,))}
        self.eos_token_ids = tuple(sorted(token_id for token_id in named if 0 <= token_id < self.vocab_size))

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, for reading its parts."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Long texts belong on another thread than the loop's: 10,000 tokens take about 10 ms."""
        # Of the library's functions only those for batches let go of the GIL (measured), and "fast" leaves out the offsets.
        return list(self._backend.encode_batch_fast([well_formed(text)], add_special_tokens=add_special_tokens)[0].ids)

    def encode_in_place(self, text: str) -> Encoding:
        """Token ids without special tokens in front, and where each stands: (first character, the one behind)."""
        return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Unknown ids are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a part of a character where the token is one."""
        return self.pieces.all_bytes(token_id)

    def _id_of(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)


def well_formed(text: str) -> str:
    """The text with lone surrogates (JSON can carry them, UTF-8 cannot) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … of tokenizer_config.json, as text whether they are given as text or as a description."""
    named: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            named[name] = content
    return named


def add_missing_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json knows and tokenizer.json does not. Raises ModelLoadError when an id would be another one."""
    described = config.get("added_tokens_decoder") or {}
    for token_id, token in sorted((int(key), value) for key, value in described.items()):
        if backend.token_to_id(token["content"]) is not None:
            continue
        flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added = AddedToken(token["content"], **flags)
        (backend.add_special_tokens if flags["special"] else backend.add_tokens)([added])
        if backend.token_to_id(token["content"]) != token_id:
            raise ModelLoadError(
                f"the tokenizer is broken: tokenizer_config.json gives {token['content']!r} the id {token_id}, "
                f"tokenizer.json leads to {backend.token_to_id(token['content'])}"
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for name in ("bos_token", "eos_token"):
        content = special_tokens.get(name)
        if content is not None and content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a model folder's tokenizer. Raises ModelLoadError."""
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    path = folder / "tokenizer.json"
    backend = _read_backend(path) if path.is_file() else _convert(folder)
    return Tokenizer(backend, config={**special_map, **config}, eos_token_ids=eos_token_ids(folder))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text according to generation_config.json and config.json (its text part included)."""
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    sources = [read_json(folder / "generation_config.json"), config, text_config if isinstance(text_config, dict) else {}]
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in values if isinstance(token_id, int))
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no such file. Raises ModelLoadError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return value


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:
        if type(error) is Exception:  # what the tokenizers library raises, and no other
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        raise


def _convert(folder: Path) -> Backend:
    """Without tokenizer.json: let transformers convert what there is."""
    if not any((folder / name).is_file() for name in _CONVERTIBLE):
        raise ModelLoadError(f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(_CONVERTIBLE)}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers is not installed to convert another form"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{folder} has no tokenizer that can be read: {' '.join(str(error).split())}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and its own form of tokenizer ({type(tokenizer).__name__}) is not supported"
        )
    return backend


def _vocab_size(backend: Backend) -> int:
    added = backend.get_added_tokens_decoder()
    return max(int(backend.get_vocab_size(with_added_tokens=True)), max(added, default=-1) + 1)
