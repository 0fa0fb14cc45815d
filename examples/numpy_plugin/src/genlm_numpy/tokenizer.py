"""A tokenizer of the engine's own. A Hugging Face tokenizer needs nothing like this."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """One token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self) -> Sequence[bytes]:
        return [bytes([byte]) for byte in range(256)]
