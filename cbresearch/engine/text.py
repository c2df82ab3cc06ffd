"""Text of a growing output, and the texts that end it."""

from collections.abc import Callable, Sequence

# What a decoder writes where the bytes of a character are not all there yet.
_UNFINISHED = "\ufffd"


class TextStream:
    """Turn output token ids into text as they come, and stop at texts that may span tokens.

    Text is handed out once it cannot change any more: a character whose bytes are spread over tokens, and
    an end that may become a stop text, are held back. What was handed out, joined, is the final text.

    Args:
        decode: Turns token ids into text. Of a few tokens and one more it must write the text of the few
            first, apart from an unfinished character at its end.
        stop: Texts that end the output; the first of them, and what follows, is cut off.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._text = ""
        self._num_given = 0
        # A token's text can depend on the one before it, so a few decoded ones are decoded again.
        self._context = 0
        self._num_whole = 0
        self._num_taken = 0
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Return all text so far, what is held back included."""
        return self._text

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take in the next token and return the text that is settled by it.

        Args:
            token_id: The token.
            may_stop: Whether a stop text that it completes ends the output.
        """
        self._token_ids.append(token_id)
        self._extend(may_stop, is_last=False)
        return self._give(len(self._text) - self._num_doubtful())

    def finish(self) -> str:
        """Return the text that was held back, since nothing follows."""
        self._extend(False, is_last=True)
        return self._give(len(self._text))

    def _extend(self, may_stop: bool, is_last: bool) -> None:
        if self.stopped_by is not None:
            return
        text = self._decode(self._token_ids[self._context :])
        settled = text if is_last else text.rstrip(_UNFINISHED)
        added = settled[self._num_taken :]
        if not added:
            return
        self._num_taken = len(settled)
        if settled == text:
            # From here on, the tokens since the text was whole before are context enough: they have text.
            self._context, self._num_whole = self._num_whole, len(self._token_ids)
            self._num_taken = len(self._decode(self._token_ids[self._context :]))
        before = len(self._text)
        self._text += added
        if may_stop:
            self._cut(before)

    def _cut(self, before: int) -> None:
        """Cut the text before the first stop text that ends behind `before`."""
        found = [
            (place, stop)
            for stop in self._stop
            if (place := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            place, self.stopped_by = min(found)
            self._text = self._text[:place]

    def _num_doubtful(self) -> int:
        """Return the length of the longest end of the text with which a stop text begins."""
        if self.stopped_by is not None:
            return 0
        text = self._text
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )

    def _give(self, end: int) -> str:
        given, self._num_given = self._text[self._num_given : end], max(self._num_given, end)
        return given
