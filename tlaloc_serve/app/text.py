"""Text for an artifact that carries its tokenizer: prompts to ids, ids to text. Loads the tokenizer at first use."""

from __future__ import annotations

from collections.abc import Sequence

from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import RequestError, TokenizerError


class Text:
    """The text side of one artifact; every method works without a tokenizer as far as no text is involved."""

    def __init__(self, artifact: Artifact):
        self._artifact = artifact
        self._loaded: Tokenizer | None = None

    def encode_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Prompts as ids. Raises RequestError for text without a tokenizer or with no token, TokenizerError for
        text it cannot encode."""
        return [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise RequestError("--text", "this artifact carries no tokenizer", todo="give token ids: --prompt 1,2")
        ids = tokenizer.encode(text)
        if not ids:
            raise RequestError("--text", "gives no token", got=repr(text), want="at least one token")
        return ids

    def facts(self, prompt: list[int], generated: list[int]) -> dict[str, str]:
        """`text` and `completion` of a sequence, nothing where the artifact carries no tokenizer."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return {}
        whole = tokenizer.decode(prompt + generated)
        before = tokenizer.decode(prompt)
        if not whole.startswith(before):
            return {"text": before, "completion": tokenizer.decode(generated)}
        return {"text": before, "completion": whole[len(before) :]}

    def _tokenizer(self) -> Tokenizer | None:
        data = self._artifact.tokenizer
        if self._loaded is None and data is not None:
            tokenizer = Tokenizer.from_bytes(data, str(self._artifact.root / "tokenizer.json"))
            vocab = self._artifact.manifest.model.vocab_size
            if tokenizer.vocab_size > vocab:
                raise TokenizerError(
                    str(self._artifact.root),
                    "the tokenizer has ids that the model does not",
                    got=tokenizer.vocab_size,
                    want=f"at most {vocab}",
                )
            self._loaded = tokenizer
        return self._loaded
