"""Generated ids as text, while they come, up to a stop string.

Rules: the text of a sequence is what its ids add to the text of its prompt, so it never gains or loses the first
space. Text goes out as soon as it is certain: an unfinished character and the beginning of a stop string are held
back. The parts joined do not depend on where tokens or parts end. What an unfinished last character left behind is not
shown, since it is no character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import RequestError

# A stop string holds back up to its own length of text, and a longer one than this is surely a mistake: a whole
# document, where a marker was meant. The automaton of 64 such strings takes some 20 MB, a request's share of memory.
MAX_STOP_LENGTH = 1000
MAX_STOPS = 64


class StopStrings:
    """Stop strings as one automaton (Aho and Corasick, 1975): its time is linear in the text, however many they are.

    Each node stands for a beginning of some stop string. `next_node` maps a character to a longer beginning, `fallback`
    names the longest other beginning that this one ends with, `depth` is its length. `complete` is the length of the
    longest stop string that it ends with, 0 for none.
    """

    def __init__(self, texts: Iterable[str]):
        """Raises RequestError for a stop string that is empty, too long, or not text, and for too many."""
        self.texts = tuple(dict.fromkeys(texts))
        _check(self.texts)
        self.next_node: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.complete = [0]
        self.fallback = [0]
        for text in self.texts:
            self.complete[self._path(text)] = len(text)
        queue = deque(self.next_node[0].values())
        while queue:
            node = queue.popleft()
            self.complete[node] = self.complete[node] or self.complete[self.fallback[node]]
            for char, below in self.next_node[node].items():
                self.fallback[below] = self.after(self.fallback[node], char)
                queue.append(below)

    def _path(self, text: str) -> int:
        """The node of `text`, made with those on the way to it."""
        node = 0
        for char in text:
            below = self.next_node[node].setdefault(char, len(self.depth))
            if below == len(self.depth):
                self.next_node.append({})
                self.depth.append(self.depth[node] + 1)
                self.complete.append(0)
                self.fallback.append(0)
            node = below
        return node

    def after(self, node: int, char: str) -> int:
        """The node of the longest beginning that the text read so far ends with, one character on."""
        while node and char not in self.next_node[node]:
            node = self.fallback[node]
        return self.next_node[node].get(char, 0)


class StopMatcher:
    """One text on its way through `StopStrings`.

    The stop string whose last character comes first ends the text; of those that this character completes, the
    longest. It is not part of the output.
    """

    def __init__(self, stops: StopStrings):
        self.stopped = False
        self._stops = stops
        self._node = 0
        self._held = ""

    def push(self, text: str) -> str:
        """What can go out now that `text` has come; nothing once a stop string was completed."""
        if self.stopped or not self._stops.texts:
            return "" if self.stopped else text
        stops, node = self._stops, self._node
        for place, char in enumerate(text, 1):
            node = stops.after(node, char)
            if stops.complete[node]:
                self.stopped = True
                return (self._held + text[:place])[: -stops.complete[node]]
        text = self._held + text
        certain = len(text) - stops.depth[node]
        self._node, self._held = node, text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back when the text is at its end."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


class TextStream:
    """The text of one sequence: its generated ids in, text out. `stopped` says that a stop string was completed."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: StopStrings, *, show_special: bool = False):
        self.prompt_text = tokenizer.decode(prompt, skip_special=not show_special)
        self._decoder = tokenizer.stream(skip_special=not show_special)
        self._matcher = StopMatcher(stops)
        self._parts: list[str] = []
        # The end of the prompt's text that its decoder still holds back: it comes out with the first generated ids.
        self._owed = self.prompt_text[sum(len(self._decoder.push(token)) for token in prompt) :]
        self._late = ""
        # A special token that is not shown still stops where its own text is a stop string.
        hidden = () if show_special else tokenizer.special_ids
        self._stop_ids = {token for token in hidden if tokenizer.id_to_token(token) in stops.texts}

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def text(self) -> str:
        """All that went out so far."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """What this id adds to what can be shown."""
        if token in self._stop_ids:
            text = self._out(self._decoder.finish().rstrip("\ufffd")) + self._flush()
            self._matcher.stopped = True
            return text
        return self._out(self._decoder.push(token))

    def finish(self) -> str:
        """The rest, when no id follows."""
        return self._out(self._decoder.finish().rstrip("\ufffd")) + self._flush()

    def _flush(self) -> str:
        self._parts.append(self._matcher.finish())
        return self._parts[-1]

    def _out(self, text: str) -> str:
        if self._owed:
            text = self._without_prompt(text)
        self._parts.append(self._matcher.push(text))
        return self._parts[-1]

    def _without_prompt(self, text: str) -> str:
        """Leave out what belongs to the prompt. Where the prompt's last character only now becomes whole, it is new."""
        self._late += text
        if self._owed.startswith(self._late):
            return ""
        text = self._late[len(self._owed) :] if self._late.startswith(self._owed) else self._late
        self._owed = self._late = ""
        return text


def _check(texts: Sequence[str]) -> None:
    if len(texts) > MAX_STOPS:
        raise RequestError("stop", "too many stop strings", got=len(texts), want=f"at most {MAX_STOPS}")
    for text in texts:
        if not text:
            raise RequestError("stop", "empty, which would stop before the first character", want="some text")
        if len(text) > MAX_STOP_LENGTH:
            raise RequestError(
                "stop",
                "too long a stop string",
                got=f"{len(text)} characters, {text[:20]!r}...",
                want=f"at most {MAX_STOP_LENGTH}",
            )
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("stop", "a lone surrogate, which no text has", got=ascii(text), want="valid text")
