"""Text of a growing output, and the texts that end it."""

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

# What a decoder writes where the bytes of a character are not all there yet, once for each or for them all.
_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 3

# Ends of a text that a tokenizer which cleans it up may still rewrite: "n ' t" becomes "n't", and " ." ".".
_REWRITTEN = re.compile(r"( {1,2}n? ?)?('[vr]?)?$")

# Where a text never comes to rest, as many of its last tokens, and of their last characters, are enough.
_WINDOW, _ALIKE = 16, 12


class _Window(NamedTuple):
    """The last tokens, which are decoded again with each new one: a token's text can depend on those before.

    Attributes:
        first: Place of its first token.
        whole: Number of tokens when the text was last at rest, with no doubt about its end.
        num_firm: Characters of the text before those that the window makes.
        num_skipped: Characters of the window's text that are among these.
    """

    first: int = 0
    whole: int = 0
    num_firm: int = 0
    num_skipped: int = 0


class Detokenizer:
    """Turn output token ids into text as they come, and stop at texts that may span tokens.

    Text is handed out once it cannot change any more: a character whose bytes are spread over tokens, an end
    that may become a stop text, and what the decoder may still rewrite, are held back. What was handed out,
    joined, is the final text, and takes a time in proportion to the tokens. Where a decoder may rewrite what
    it wrote, all tokens are decoded again with each new one, and text comes by whole words.

    Attributes:
        text: All text so far, what is held back included.
        stopped_by: The stop text that ended the output, or None.

    Args:
        decode: Turns token ids into text. Of a few tokens and one more it must write the text of the few
            first, apart from an unfinished character at its end; or it says what it does else, as
            `models.TextDecoder` does.
        stop: Texts that end the output; the first of them, and what follows, is cut off.
        min_tokens: Tokens before which no stop text ends the output.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._decoder = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._byte_token_ids: frozenset[int] = getattr(decode, "byte_token_ids", frozenset())
        self._is_stable: bool = getattr(decode, "is_stable", True)
        self._cleans_up: bool = getattr(decode, "cleans_up", False)
        self._skips: Callable[[int], bool] = getattr(decode, "skips", lambda _: False)
        self._num_tokens = 0
        self._window = _Window()
        # The window before the run of bytes at the end, or None.
        self._before_run: _Window | None = None
        self._num_given = self._num_rewritten = 0

    def push(self, *token_ids: int) -> str:
        """Take in the next tokens and return the text that is settled by them."""
        for token_id in token_ids:
            if self.stopped_by is None:
                self._take(token_id)
        if self.stopped_by is not None:
            return self._give(len(self.text))
        if self._before_run is not None:
            return ""
        end = len(self.text) - self._num_rewritten
        return self._give(end - self._num_doubtful(self.text[:end]))

    def finish(self) -> str:
        """Return the text that was held back, since nothing follows."""
        if self.stopped_by is None:
            self.text = self._decode(self._token_ids)
        return self._give(len(self.text))

    def _take(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._skips(token_id):
            return
        self._token_ids.append(token_id)
        if token_id in self._byte_token_ids:
            self._before_run = self._before_run or self._window
        elif self._before_run is not None:
            self._window, self._before_run = self._before_run, None
        first, whole, num_firm, num_skipped = self._window
        num_tokens = len(self._token_ids)
        if self._before_run is not None and num_tokens - whole > _MOST_UNFINISHED + 1:
            # These bytes are no text, however they go on.
            return
        text = self._decode(self._token_ids[first:])
        num_shown = max(len(text.rstrip(_UNFINISHED)), len(text) - _MOST_UNFINISHED)
        old, self.text = self.text[num_firm:], self.text[:num_firm] + text[num_skipped:num_shown]
        pairs = zip(old, self.text[num_firm:], strict=False)
        num_kept = num_firm + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._num_rewritten = self._rewritten(self.text)
        num_doubtful = len(text) - num_shown + self._num_rewritten
        if not self._is_stable:
            # All is decoded again, and the last word may still change.
            num_settled = len("".join(self.text.rsplit(maxsplit=1)[:-1]))
            self._num_rewritten = max(self._num_rewritten, len(self.text) - num_settled)
            self._window = _Window(whole=num_tokens)
        elif num_doubtful or len(self.text) == num_firm:
            self._shorten(text, num_doubtful)
        else:
            # From here on, the tokens since the text was at rest before are context enough: they have text.
            context = self._decode(self._token_ids[whole:])
            if self._rewritten(context):
                self._shorten(text, 0)
            else:
                self._window = _Window(whole, num_tokens, len(self.text), len(context))
        if self._num_tokens < self._min_tokens:
            return
        # Those that end behind what was there before.
        places = ((self.text.find(stop, max(0, num_kept - len(stop) + 1)), stop) for stop in self._stop)
        found = min(((place, stop) for place, stop in places if place >= 0), default=None)
        if found:
            self.text, self.stopped_by = self.text[: found[0]], found[1]

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return self._decoder(token_ids)
        except BaseException as error:
            # A library in Rust panics with what is no `Exception`, and would end more than one request.
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _shorten(self, text: str, num_doubtful: int) -> None:
        """Go on with the window's last tokens if it is long and they write its text's end alike."""
        first = len(self._token_ids) - _WINDOW
        if first < self._window.first + _WINDOW or first % _WINDOW:
            return
        end = self._decode(self._token_ids[first:])
        if len(end) > _ALIKE and text.endswith(end[-_ALIKE:]):
            num_firm = len(self.text) - self._num_rewritten
            self._window = _Window(first, first, num_firm, len(end) - num_doubtful)

    def _rewritten(self, text: str) -> int:
        """Return the length of the end of a text that the decoder may still rewrite."""
        found = _REWRITTEN.search(text[-_ALIKE:]) if self._cleans_up else None
        return len(found[0]) if found else 0

    def _num_doubtful(self, text: str) -> int:
        """Return the length of the longest end of a text with which a stop text begins."""
        ends = (
            length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length])
        )
        return max(ends, default=0)

    def _give(self, end: int) -> str:
        given, self._num_given = self.text[self._num_given : end], max(self._num_given, end)
        return given
