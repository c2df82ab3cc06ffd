"""Text of a growing output, and the texts that end it."""

from collections.abc import Callable, Iterable, Sequence

# What a decoder writes where the bytes of a character are not all there yet.
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Turn output token ids into text as they come, and stop at texts that may span tokens.

    Text is handed out once it cannot change any more: a character whose bytes are spread over tokens, and
    an end that may become a stop text, are held back. What was handed out, joined, is the final text.

    Attributes:
        text: All text so far, what is held back included.
        stopped_by: The stop text that ended the output, or None.

    Args:
        decode: Turns token ids into text. Of a few tokens and one more it must write the text of the few
            first, apart from an unfinished character at its end.
        stop: Texts that end the output; the first of them, and what follows, is cut off.
        min_tokens: Tokens before which no stop text ends the output.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._decode = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._num_given = 0
        # A token's text can depend on the one before it, so a few decoded ones are decoded again: those from
        # `_context` on, of whose text `_num_taken` characters are taken. All of it was whole at `_num_whole`.
        self._context = self._num_whole = self._num_taken = 0

    def push(self, *token_ids: int) -> str:
        """Take in the next tokens and return the text that is settled by them."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._decode_more(is_last=False)
        return self._give(len(self.text) - self._num_doubtful())

    def finish(self) -> str:
        """Return the text that was held back, since nothing follows."""
        self._decode_more(is_last=True)
        return self._give(len(self.text))

    def _decode_more(self, is_last: bool) -> None:
        if self.stopped_by is not None:
            return
        text = self._decode(self._token_ids[self._context :])
        settled = text if is_last else text.rstrip(_UNFINISHED)
        before = len(self.text)
        self.text += settled[self._num_taken :]
        if len(self.text) == before:
            return
        self._num_taken = len(settled)
        if settled == text:
            # From here on, the tokens since the text was whole before are context enough: they have text.
            self._context, self._num_whole = self._num_whole, len(self._token_ids)
            self._num_taken = len(self._decode(self._token_ids[self._context :]))
        if is_last or len(self._token_ids) < self._min_tokens:
            return
        # Those that end behind what was there before.
        places = ((self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop)
        found = min(((place, stop) for place, stop in places if place >= 0), default=None)
        if found:
            self.text, self.stopped_by = self.text[: found[0]], found[1]

    def _num_doubtful(self) -> int:
        """Return the length of the longest end of the text with which a stop text begins."""
        stops: Iterable[str] = self._stop if self.stopped_by is None else ()
        ends = (
            length for stop in stops for length in range(1, len(stop)) if self.text.endswith(stop[:length])
        )
        return max(ends, default=0)

    def _give(self, end: int) -> str:
        given, self._num_given = self.text[self._num_given : end], max(self._num_given, end)
        return given
