"""Text to token ids and back, with the `tokenizers` library alone: `transformers` would cost the
front process 50 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.prompt.control_tokens import guard_against, leave_out_breaks
from holdfast.front.prompt.seams import find_seams
from holdfast.front.prompt.token_places import EncodedText
from holdfast.models.tokenizer_files import (
    add_missing_tokens,
    end_token_ids,
    eos_token_ids,
    named_special_tokens,
    read_backend,
    tokenizer_config,
    vocabulary_size,
)
from holdfast.wire.token_ids import TokenIds

_SHORT_CHARACTERS = 4096  # about 1 ms


class Tokenizer:
    """A model's tokenizer with its special tokens.

    Immutable after it is built; may be used from several threads.
    """

    def __init__(
        self, backend: Backend, *, config: Mapping[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        """config: tokenizer_config.json. eos_token_ids: those that the model's own files name."""
        # some files were saved with the truncation and padding of their training
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = named_special_tokens(config)
        add_missing_tokens(backend, config, self.special_tokens)
        leave_out_breaks(backend)
        # breaks what spells a control token in a text that is not the model's
        self.guard = guard_against(backend)
        self.pieces = TokenPieces(backend)
        self.vocab_size = vocabulary_size(backend)
        added = backend.get_added_tokens_decoder().values()
        self.special_texts = tuple(
            token.content for token in added if token.special and token.content
        )
        self.bos_token_id = self._id_of("bos_token")
        self.seams = find_seams(backend)
        plain, complete = (
            backend.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        self.ends_texts = plain[-1:] != complete[-1:]  # it writes a token behind every text
        before = next(
            (at for at in range(len(complete)) if complete[at : at + len(plain)] == plain), 0
        )
        self._around = TokenIds.of(complete[:before]), TokenIds.of(complete[before + len(plain) :])
        self.eos_token_ids = end_token_ids(backend, self.special_tokens, named=eos_token_ids)

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, for reading its parts."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Long texts belong on another thread than the loop's: 10,000 tokens take about 10 ms.
        """
        (encoding,) = self._encodings([well_formed(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, without special tokens around them."""
        return [encoding.ids for encoding in self._encodings(texts)]

    def encode_in_place(self, texts: Sequence[str]) -> list[EncodedText]:
        """The same, with the places where tokens stand."""
        encodings = self._encodings(texts, with_places=True)
        return [
            EncodedText(each, characters=len(text))
            for text, each in zip(texts, encodings, strict=True)
        ]

    def with_special_tokens(self, token_ids: TokenIds) -> TokenIds:
        """The tokens of a text with the special ones that this tokenizer puts around every text."""
        return TokenIds.joined((self._around[0], token_ids, self._around[1]))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Unknown ids are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a part of a character where the token is one."""
        return self.pieces.all_bytes(token_id)

    def _encodings(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, with_places: bool = False
    ) -> Sequence[Encoding]:
        # Of the library's functions only those for batches let go of the GIL (measured), and "fast"
        # leaves out the places. They wake threads for it, which takes longer than a short text
        # does.
        if sum(map(len, texts)) <= _SHORT_CHARACTERS:
            return [
                self._backend.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        encode = self._backend.encode_batch if with_places else self._backend.encode_batch_fast
        return encode(list(texts), add_special_tokens=add_special_tokens)

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


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a model folder's tokenizer. Raises ModelLoadError."""
    return Tokenizer(
        read_backend(folder), config=tokenizer_config(folder), eos_token_ids=eos_token_ids(folder)
    )
