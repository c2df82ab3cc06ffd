"""Users who wait for an answer before they go on: closed loops, chats of many turns, agents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cbresearch.request import Prompt, Request
from cbresearch.workloads.arrivals import Arrivals, check_positive, draw_times
from cbresearch.workloads.lengths import Draw, DrawPairs
from cbresearch.workloads.mix import TO_THE_END, Prefixes, checked_lengths, checked_pairs, draw_tokens

Pause = float | Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Seconds between an answer's end and the next request: a constant, or draws so many."""


class Ended(Protocol):
    """What is asked of the record of a request that ended; a `RequestRecord` is one."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def tokens(self) -> Sequence[int]:
        """The answer."""

    @property
    def finish(self) -> float | None:
        """Seconds since the start of the run at which the answer was complete, or None if it never was."""


Then = Callable[[Ended], list[Request]]
"""Says which requests follow on one that ended: what `simulate` and `serve` take as `then`."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """Pauses of an exponential distribution.

    Attributes:
        mean: Seconds.

    Raises:
        ValueError: The mean is not a positive number.
    """

    mean: float

    def __post_init__(self) -> None:
        check_positive("mean", self.mean, "seconds")

    def __call__(self, rng: np.random.Generator, number: int) -> NDArray[np.float64]:
        """Return so many pauses in seconds."""
        return rng.exponential(self.mean, number)


class Turn(NamedTuple):
    """One request of a user.

    Attributes:
        text: What it adds: token ids, or their number.
        max_tokens: Output tokens.
        pause: Seconds since the end of the answer before; for the first one, since the start of the run.
    """

    text: tuple[int, ...] | int
    max_tokens: int
    pause: float


@dataclass(frozen=True, slots=True)
class Session:
    """What one user sends.

    Attributes:
        client: The user; turn k has the id "client/k".
        turns: The requests, each sent after the answer to the one before.
        remembers: A prompt is all that was said before, answers included, and the new text; so the prefix
            cache finds it all but the new text. Otherwise it is the new text alone.
    """

    client: str
    turns: tuple[Turn, ...]
    remembers: bool = False


@dataclass(frozen=True, slots=True)
class Sessions:
    """Users who each wait for an answer before they send the next request.

    All that is random is drawn beforehand: under any policy, the same users send the same texts and pause as
    long.

        requests, then = sessions.start()
        trace = simulate(requests, "sjf", cache=CacheConfig(4096), then=then)

    Name the KV pool: the simulator's default one is sized for the requests that are given, the first ones.

    Attributes:
        sessions: One a user.
    """

    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        """Return how many requests the users send in all, if none is refused."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest request, prompt and output, which a KV pool has to hold."""
        return max((request.num_prompt_tokens + request.max_tokens for request in self.flat(0.0)), default=0)

    def start(self) -> tuple[list[Request], Then]:
        """Return each user's first request, and the function that says what follows, for one run.

        A prompt holds the tokens that were really generated. A user whose request was refused, aborted or
        failed sends nothing more. The function remembers the prompts of its run: call this once a run.
        """
        scripts = {session.client: session for session in self.sessions}
        prompts: dict[str, Prompt] = {}

        def request(session: Session, place: int, before: Prompt | None, after: float) -> Request:
            turn = session.turns[place]
            prompt = turn.text if before is None else _joined(before, turn.text)
            made = _request(session, place, prompt, after + turn.pause)
            if session.remembers:
                prompts[made.id] = prompt
            return made

        def then(record: Ended) -> list[Request]:
            client, _, number = record.id.rpartition("/")
            # Others may be served in the same run.
            session = scripts.get(client)
            if session is None or not number.isdecimal():
                return []
            prompt, place = prompts.pop(record.id, None), int(number) + 1
            if record.finish is None or place >= len(session.turns):
                return []
            said = None if prompt is None else _joined(prompt, tuple(record.tokens))
            return [request(session, place, said, record.finish)]

        return [request(session, 0, None, 0.0) for session in self.sessions if session.turns], then

    def flat(self, token_seconds: float) -> list[Request]:
        """Return all requests with fixed arrivals, as if each answer took its nominal time; this is invented.

        It is an open loop: a slow server is not given the time that real users would give it. A turn comes
        its pause and output tokens · `token_seconds` after the one before. The answers in the prompts are
        zeros, which is what the simulator generates; a model generates something else, and then the prefix
        cache finds only the prompt before, not its answer.

        Args:
            token_seconds: Seconds that a token of output takes, 0 or more.

        Raises:
            ValueError: They are not such.
        """
        if not 0 <= token_seconds < math.inf:
            raise ValueError(f"token_seconds is {token_seconds!r}; it must be finite, 0 or more")
        requests = []
        for session in self.sessions:
            now, said = 0.0, None
            for place, turn in enumerate(session.turns):
                now += turn.pause
                prompt = turn.text if said is None else _joined(said, turn.text)
                requests.append(_request(session, place, prompt, now))
                now += turn.max_tokens * token_seconds
                said = _joined(prompt, (0,) * turn.max_tokens) if session.remembers else None
        return sorted(requests, key=lambda request: request.arrival)


def closed_loop(
    num_users: int,
    requests_per_user: int,
    lengths: DrawPairs | tuple[Draw, Draw],
    rng: np.random.Generator,
    *,
    think: Pause = 0.0,
) -> Sessions:
    """Return users who always have one request under way or think about the next one.

    By the response-time law, their throughput is num_users / (mean response time + mean think time).

    Args:
        num_users: So many requests are under way at most.
        requests_per_user: How many each sends.
        lengths: Prompt and output lengths, as for `make_requests`; prompts are lengths.
        rng: Gives one number, which all else depends on.
        think: Pause between an answer and the next request; each user's first request comes after one too.

    Raises:
        ValueError: A number is below 1, or what was drawn are no lengths or no pauses.
    """
    _check_count("num_users", num_users)
    _check_count("requests_per_user", requests_per_user)
    for_lengths, for_pauses = _sources(rng, 2)
    number = num_users * requests_per_user
    prompts, outputs = checked_pairs(lengths, for_lengths, number)
    pauses = _pauses(think, for_pauses, number)
    turns = [Turn(*turn) for turn in zip(prompts, outputs, pauses, strict=True)]
    starts = range(0, number, requests_per_user)
    return Sessions(
        tuple(
            Session(f"user{place}", tuple(turns[start : start + requests_per_user]))
            for place, start in enumerate(starts)
        )
    )


def conversations(
    arrivals: Arrivals,
    num_sessions: int,
    rng: np.random.Generator,
    *,
    turns: Draw,
    texts: Draw,
    outputs: Draw,
    think: Pause,
    prefixes: Prefixes | None = None,
    max_context: int | None = None,
) -> Sessions:
    """Return chats or agents: every prompt is the one before, its answer, and new text.

    Args:
        arrivals: When the sessions begin.
        num_sessions: How many.
        rng: Gives one number, which all else depends on.
        turns: Requests of a session.
        texts: New tokens of a turn: what a user writes, or what a tool returns.
        outputs: Output tokens of a turn.
        think: Pause between an answer and the next turn: a user reads and writes, or a tool runs.
        prefixes: What sessions begin with, in front of the first text, such as a system prompt.
        max_context: A session ends before the turn whose prompt and output would be longer, in tokens.

    Raises:
        ValueError: What was drawn are no arrivals, lengths or pauses.
    """
    for_times, for_turns, for_texts, for_outputs, for_pauses, for_tokens = _sources(rng, 6)
    times = draw_times(arrivals, for_times, num_sessions)
    begins: Sequence[tuple[int, ...]] = [()] * num_sessions
    if prefixes is not None:
        known = prefixes.draw(for_tokens)
        begins = [known[place] for place in prefixes.choose(for_tokens, num_sessions)]
    sessions = []
    numbers = checked_lengths(turns, for_turns, num_sessions)
    for place, (start, begin, number) in enumerate(zip(times.tolist(), begins, numbers, strict=True)):
        new = checked_lengths(texts, for_texts, number)
        answers = checked_lengths(outputs, for_outputs, number)
        pauses = [start, *_pauses(think, for_pauses, number)[1:]]
        made, context = [], len(begin)
        for turn, (length, output, pause) in enumerate(zip(new, answers, pauses, strict=True)):
            context += length + output
            if max_context is not None and context > max_context:
                break
            text = draw_tokens(for_tokens, length)
            made.append(Turn(text if turn else begin + text, output, pause))
        sessions.append(Session(f"session{place}", tuple(made), remembers=True))
    return Sessions(tuple(sessions))


def _request(session: Session, place: int, prompt: Prompt, arrival: float) -> Request:
    name = f"{session.client}/{place}"
    return Request(name, prompt, session.turns[place].max_tokens, arrival, TO_THE_END, client=session.client)


def _joined(before: Prompt, new: tuple[int, ...] | int) -> Prompt:
    """Return one prompt behind another: token ids if both are, else a length."""
    if isinstance(before, tuple) and isinstance(new, tuple):
        return before + new
    lengths = [part if isinstance(part, int) else len(part) for part in (before, new)]
    return sum(lengths)


def _sources(rng: np.random.Generator, number: int) -> list[np.random.Generator]:
    seed = int(rng.integers(2**63))
    return [np.random.default_rng([seed, part]) for part in range(number)]


def _pauses(pause: Pause, rng: np.random.Generator, number: int) -> list[float]:
    drawn = np.asarray(pause(rng, number) if callable(pause) else np.full(number, float(pause)))
    if drawn.shape != (number,) or not np.all(np.isfinite(drawn) & (drawn >= 0)):
        raise ValueError(f"think gives {drawn!r}; it must be {number} finite numbers of seconds, 0 or more")
    pauses: list[float] = drawn.tolist()
    return pauses


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value!r}; it must be at least 1")
