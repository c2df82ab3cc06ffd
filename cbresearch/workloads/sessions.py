"""Closed loops: users that wait for each answer before their next request, chats of many turns, agents."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbresearch.checks import count, real
from cbresearch.request import Prompt, Request
from cbresearch.trace import RequestRecord
from cbresearch.workloads.arrivals import Arrivals, draw_times
from cbresearch.workloads.common import Rng, checked, split_rng
from cbresearch.workloads.lengths import Draw, DrawPairs, drawn_lengths
from cbresearch.workloads.requests import TO_THE_END, Prefixes, checked_pairs, draw_tokens

Pause = float | Callable[[Rng, int], NDArray[np.float64]]
"""Seconds between an answer's end and the next request: a constant, or draws so many."""


ClosedLoopClient = Callable[[RequestRecord], list[Request]]
"""Says which requests follow on one that ended: what `simulate` and `serve` take as `on_finish`."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """Pauses of an exponential distribution.

    Attributes:
        mean: Mean pause in seconds.

    Raises:
        ValueError: The mean is not a positive number.
    """

    mean: float

    def __post_init__(self) -> None:
        real("mean", self.mean, positive=True, unit="seconds")

    def __call__(self, rng: Rng, number: int) -> NDArray[np.float64]:
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

    def request(self, place: int, said: Prompt | None, after: float) -> Request:
        """Return the request of a turn.

        Args:
            place: Index of the turn.
            said: The prompt and the answer before, or None if the prompt is the turn's text alone.
            after: Seconds since the start of the run at which that answer was complete.
        """
        text, max_tokens, pause = self.turns[place]
        prompt = text if said is None else _joined(said, text)
        name, arrival = f"{self.client}/{place}", after + pause
        return Request(name, prompt, max_tokens, arrival, TO_THE_END, client=self.client)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Users that each wait for an answer before their next request.

    All that is random is drawn beforehand: under any policy, the same users send the same texts and pause as
    long.

        requests, on_finish = sessions.start()
        trace = simulate(requests, "sjf", cache=CacheConfig(4096), on_finish=on_finish)

    Name the KV pool: the simulator's default one is sized for the requests that are given, the first ones.

    Attributes:
        sessions: One a user.
    """

    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        """Return how many requests the users send in all, if none is rejected."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest request, prompt and output, which a KV pool has to hold."""
        return max((request.num_prompt_tokens + request.max_tokens for request in self.flat(0.0)), default=0)

    def start(self) -> tuple[list[Request], ClosedLoopClient]:
        """Return each user's first request, and the closed-loop client that sends the others, for one run.

        A prompt holds the tokens that were really generated. A user whose request was rejected, aborted or
        failed sends nothing more. The client remembers the prompts of its run: call this once a run.
        """
        sessions = {session.client: session for session in self.sessions}
        prompts: dict[str, Prompt] = {}

        def sent(request: Request) -> Request:
            if sessions[request.client].remembers:
                prompts[request.id] = request.prompt
            return request

        def on_finish(record: RequestRecord) -> list[Request]:
            client, _, number = record.id.rpartition("/")
            # The run may serve requests of other workloads too.
            session = sessions.get(client)
            if session is None or not number.isdecimal():
                return []
            prompt, place = prompts.pop(record.id, None), int(number) + 1
            if record.finish is None or place >= len(session.turns):
                return []
            said = None if prompt is None else _joined(prompt, tuple(record.tokens))
            return [sent(session.request(place, said, record.finish))]

        return [sent(session.request(0, None, 0.0)) for session in self.sessions if session.turns], on_finish

    def flat(self, token_seconds: float) -> list[Request]:
        """Return all requests with fixed arrivals, as if each answer took its nominal time; this is invented.

        It is an open loop: a slow server is not given the time that real users would give it. A turn comes
        its pause and output tokens · `token_seconds` after the one before. The answers in the prompts are
        zeros, which is what the simulator generates; a model generates something else, and then the prefix
        cache finds only the prompt before, not its answer.

        Args:
            token_seconds: Seconds that a token of output takes, 0 or more.

        Raises:
            ValueError: `token_seconds` is negative or not finite.
        """
        token_seconds = real("token_seconds", token_seconds)
        requests = []
        for session in self.sessions:
            now, said = 0.0, None
            for place, turn in enumerate(session.turns):
                request = session.request(place, said, now)
                now = request.arrival + turn.max_tokens * token_seconds
                said = _joined(request.prompt, (0,) * turn.max_tokens) if session.remembers else None
                requests.append(request)
        return sorted(requests, key=lambda request: request.arrival)


def closed_loop(
    num_users: int, requests_per_user: int, lengths: DrawPairs, rng: Rng, *, think: Pause = 0.0
) -> Sessions:
    """Return users that always have one request under way or think about the next one.

    By the response-time law, their throughput is num_users / (mean response time + mean think time).

    Args:
        num_users: So many requests are under way at most.
        requests_per_user: Number of requests of each user.
        lengths: Prompt and output lengths, as for `make_requests`; prompts are lengths.
        rng: Gives one number, which all else depends on.
        think: Pause between an answer and the next request; each user's first request comes after one too.

    Raises:
        ValueError: A number is below 1, or what was drawn are no lengths or no pauses.
    """
    num_users = count("num_users", num_users)
    requests_per_user = count("requests_per_user", requests_per_user)
    for_lengths, for_pauses = split_rng(rng, 2)
    number = num_users * requests_per_user
    prompts, outputs = checked_pairs(lengths, for_lengths, number)
    turns = [Turn(*turn) for turn in zip(prompts, outputs, _pauses(think, for_pauses, number), strict=True)]
    starts = range(0, number, requests_per_user)
    shares = [tuple(turns[start : start + requests_per_user]) for start in starts]
    return Sessions(tuple(Session(f"user{place}", share) for place, share in enumerate(shares)))


def conversations(
    arrivals: Arrivals,
    num_sessions: int,
    rng: Rng,
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
        arrivals: Times at which the sessions begin, as a process.
        num_sessions: Number of sessions.
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
    for_times, for_turns, for_texts, for_outputs, for_pauses, for_tokens = split_rng(rng, 6)
    times = draw_times(arrivals, for_times, num_sessions)
    limit = math.inf if max_context is None else count("max_context", max_context)
    begins = [()] * num_sessions if prefixes is None else prefixes.draw(for_tokens, num_sessions)
    numbers = drawn_lengths(turns, for_turns, num_sessions)
    sessions = []
    for place, (start, begin, number) in enumerate(zip(times, begins, numbers, strict=True)):
        new = drawn_lengths(texts, for_texts, number)
        answers = drawn_lengths(outputs, for_outputs, number)
        pauses = [start, *_pauses(think, for_pauses, number)[1:]]
        made, context = [], len(begin)
        for length, output, pause in zip(new, answers, pauses, strict=True):
            context += length + output
            if context > limit:
                break
            made.append(Turn(begin + draw_tokens(for_tokens, length), output, pause))
            begin = ()
        sessions.append(Session(f"session{place}", tuple(made), remembers=True))
    return Sessions(tuple(sessions))


def _joined(before: Prompt, new: tuple[int, ...] | int) -> Prompt:
    """Return one prompt behind another: token ids if both are, else a length."""
    if isinstance(before, tuple) and isinstance(new, tuple):
        return before + new
    return sum(part if isinstance(part, int) else len(part) for part in (before, new))


def _pauses(pause: Pause, rng: Rng, number: int) -> list[float]:
    drawn = pause(rng, number) if callable(pause) else np.full(number, real("think", pause))
    return checked("pause", drawn, number, "think must give finite seconds, 0 or more")
