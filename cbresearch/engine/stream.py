"""What comes of a request in an engine: its tokens as they come, and all of it in the end."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbresearch.engine.text import TextStream
from cbresearch.request import Request, TokenLogprobs
from cbresearch.trace import RequestRecord


class StreamedToken(NamedTuple):
    """One output token.

    Attributes:
        token_id: The token.
        text: The text that is settled by it; a character spread over tokens comes with its last one.
        logprobs: Its log-probabilities, where they were asked for.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Output:
    """One answer.

    Attributes:
        id: The request's id.
        prompt_token_ids: Its prompt, empty if it was rejected before it was tokenized.
        token_ids: The answer.
        text: The answer's text, without the stop text that ended it; of an answer that was cut short only
            what was settled.
        finish_reason: "stop", "length", "abort" or "error"; None if the request was rejected.
        stop_reason: The stop text or the token that ended the answer, or None.
        logprobs: Log-probabilities of each token, where they were asked for.
        error: Why it was rejected or what it failed of, or None.
        record: When what happened to it.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None
    record: RequestRecord


class Stream:
    """The tokens of one request, for one reader: `for`, `async for`, or `result()` for all at once.

    Reading never holds up the engine, and text is made of tokens by the reader. As a context manager it
    aborts what is unfinished at its end.

    Args:
        request: The request, with token ids for a prompt.
        decode: Turns token ids into text.
        abort: Aborts the request.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[Sequence[int]], str],
        abort: Callable[[str], object],
    ) -> None:
        self.request = request
        self._text = TextStream(decode, request.sampling.stop)
        self._decode = decode
        self._abort = abort
        self._condition = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._num_read = 0
        self._record: RequestRecord | None = None

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.request.id

    @property
    def is_finished(self) -> bool:
        """Return whether no more tokens will come."""
        return self._record is not None

    def abort(self) -> None:
        """End the request wherever it is; what it has generated stays. If it is finished, nothing happens."""
        self._abort(self.id)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end and return the whole answer, whatever was read of it before.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: It is not finished by then; it goes on.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._record is not None, timeout):
                raise TimeoutError(f"request {self.id!r} is not finished after {timeout} seconds; it goes on")
        return self._output()

    def put(
        self, tokens: Iterable[tuple[int, TokenLogprobs | None]], record: RequestRecord | None = None
    ) -> None:
        """Hand over the next tokens and, with the last of them, the record; for the engine."""
        with self._condition:
            self._tokens.extend(tokens)
            self._record = record
            wakers, self._wakers = self._wakers, []
            self._condition.notify_all()
        for wake in wakers:
            try:
                wake()
            except RuntimeError:
                # The reader's event loop is closed: nobody waits there any more.
                continue

    def __iter__(self) -> Iterator[StreamedToken]:
        return self

    def __next__(self) -> StreamedToken:
        with self._condition:
            self._condition.wait_for(lambda: self._tokens or self._record is not None)
            token = self._tokens.popleft() if self._tokens else None
        if token is None:
            raise StopIteration
        return self._streamed(*token)

    def __aiter__(self) -> AsyncIterator[StreamedToken]:
        return self

    async def __anext__(self) -> StreamedToken:
        await self._wait(lambda: bool(self._tokens) or self._record is not None)
        token = self._tokens.popleft() if self._tokens else None
        if token is None:
            raise StopAsyncIteration
        return self._streamed(*token)

    def __await__(self) -> Generator[Any, None, Output]:
        yield from self._wait(lambda: self._record is not None).__await__()
        return self._output()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait in an event loop; the engine's thread wakes it."""
        loop = asyncio.get_running_loop()
        while True:
            event = asyncio.Event()

            def wake(event: asyncio.Event = event) -> None:
                loop.call_soon_threadsafe(event.set)

            with self._condition:
                if is_ready():
                    return
                self._wakers.append(wake)
            await event.wait()

    def _streamed(self, token_id: int, logprobs: TokenLogprobs | None) -> StreamedToken:
        self._num_read += 1
        text = self._text.push(token_id, self._num_read >= self.request.sampling.min_tokens)
        record = self._record
        if record is not None and record.is_complete and self._num_read == len(record.tokens):
            text += self._text.finish()
        return StreamedToken(token_id, text, logprobs)

    def _output(self) -> Output:
        record, request = self._record, self.request
        assert record is not None
        sampling = request.sampling
        text = TextStream(self._decode, sampling.stop)
        settled = [
            text.push(token, place >= sampling.min_tokens)
            for place, token in enumerate(record.tokens, start=1)
        ]
        if record.is_complete:
            settled.append(text.finish())
        stop_reason: str | int | None = text.stopped_by
        if stop_reason is None and record.finish_reason == "stop":
            stop_reason = record.tokens[-1]
        return Output(
            id=request.id,
            prompt_token_ids=request.prompt if isinstance(request.prompt, tuple) else (),
            token_ids=record.tokens,
            text="".join(settled),
            finish_reason=record.finish_reason,
            stop_reason=stop_reason,
            logprobs=record.logprobs,
            error=record.error,
            record=record,
        )
