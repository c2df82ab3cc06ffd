"""What comes of a request in an engine: its tokens as they come, and all of it in the end."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cbresearch.engine.detokenizer import Detokenizer
from cbresearch.request import Request, TokenLogprobs
from cbresearch.trace import RequestRecord

_T = TypeVar("_T")


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


class TokenStream:
    """The tokens of one request, for one reader: `for`, `async for`, or `result()` for all at once.

    Reading never holds up the engine, and text is made of tokens by the reader. As a context manager, plain
    or `async`, it aborts what is unfinished at its end.

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
        self._decode = decode
        self._abort = abort
        self._detokenizer = self._new_detokenizer()
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._num_read = 0
        self._process = os.getpid()
        self._record: Future[RequestRecord] = _running()
        # Done, and replaced by another, when there is something new.
        self._news: Future[None] = _running()

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.request.id

    @property
    def is_finished(self) -> bool:
        """Return whether no more tokens will come."""
        return self._record.done()

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
        try:
            return self._output(self._awaited(self._record).result(timeout))
        except TimeoutError:
            raise TimeoutError(
                f"request {self.id!r} is not finished after {timeout} seconds; it goes on"
            ) from None

    def put(
        self, tokens: Iterable[tuple[int, TokenLogprobs | None]], record: RequestRecord | None = None
    ) -> None:
        """Hand over the next tokens and, with the last of them, the record; for the engine."""
        self._tokens.extend(tokens)
        if record is not None:
            self._record.set_result(record)
        news, self._news = self._news, _running()
        news.set_result(None)

    def __iter__(self) -> Iterator[StreamedToken]:
        return self

    def __next__(self) -> StreamedToken:
        while isinstance(found := self._look(), Future):
            found.result()
        if found is None:
            raise StopIteration
        return found

    def __aiter__(self) -> AsyncIterator[StreamedToken]:
        return self

    async def __anext__(self) -> StreamedToken:
        while isinstance(found := self._look(), Future):
            await asyncio.wrap_future(found)
        if found is None:
            raise StopAsyncIteration
        return found

    def __await__(self) -> Generator[Any, None, Output]:
        record = yield from asyncio.wrap_future(self._awaited(self._record))
        return self._output(record)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def _look(self) -> StreamedToken | Future[None] | None:
        """Return the next token, or what to wait for before another look, or None at the end."""
        # In this order: what comes meanwhile is then noticed by the next look.
        news, is_finished = self._news, self.is_finished
        if not self._tokens:
            return None if is_finished else self._awaited(news)
        token_id, logprobs = self._tokens.popleft()
        self._num_read += 1
        text = self._detokenizer.push(token_id)
        if self.is_finished:
            record = self._record.result()
            if record.is_complete and self._num_read == len(record.tokens):
                text += self._detokenizer.finish()
        return StreamedToken(token_id, text, logprobs)

    def _awaited(self, future: Future[_T]) -> Future[_T]:
        if not future.done():
            check_process(self._process)
        return future

    def _new_detokenizer(self) -> Detokenizer:
        sampling = self.request.sampling
        return Detokenizer(self._decode, sampling.stop, sampling.min_tokens)

    def _output(self, record: RequestRecord) -> Output:
        detokenizer = self._new_detokenizer()
        text, error = "", record.error
        try:
            text = detokenizer.push(*record.tokens)
            if record.is_complete:
                detokenizer.finish()
                text = detokenizer.text
        except Exception as problem:
            error = f"its text could not be decoded: {type(problem).__name__}: {problem}"
        stop_reason: str | int | None = detokenizer.stopped_by
        if stop_reason is None and record.finish_reason == "stop":
            stop_reason = record.tokens[-1]
        prompt = self.request.prompt
        prompt_token_ids = prompt if isinstance(prompt, tuple) else ()
        ending = (record.finish_reason, stop_reason, record.logprobs, error, record)
        return Output(self.id, prompt_token_ids, record.tokens, text, *ending)


def check_process(process: int) -> None:
    """Reject to wait for what happens in another process.

    Raises:
        RuntimeError: This process is a fork of the given one, without the engine's thread.
    """
    if os.getpid() != process:
        raise RuntimeError(
            f"the engine runs in process {process}, and a fork of it has no copy of its thread; build "
            f"another engine in process {os.getpid()}"
        )


def _running() -> Future[Any]:
    """Return a future that a reader who stops waiting does not cancel for the others."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
