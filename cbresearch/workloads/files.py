"""Read whom to serve, from a preset, a public trace or a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbresearch.request import Refusal, Request
from cbresearch.workloads import mooncake
from cbresearch.workloads.arrivals import scale_rate
from cbresearch.workloads.draws import spread_arrivals
from cbresearch.workloads.lines import EXAMPLE, first_keys, parse, suggestion
from cbresearch.workloads.named import PRESETS
from cbresearch.workloads.options import keyword_options, parse_options
from cbresearch.workloads.public import TRACES, fetch
from cbresearch.workloads.tables import read_table, table_of, unknown_header

_UNREAD_ENDINGS = (".tsv", ".parquet", ".xlsx", ".gz", ".zip", ".zst")

MOONCAKE_TICK = 3.0
"""Seconds to which the arrivals of Mooncake's conversation trace are rounded."""


class TraceFile(NamedTuple):
    """What a file held.

    Attributes:
        kind: "workload", "mooncake", "azure", "burstgpt", "vidur", or "vidur_lengths" (without arrivals).
        requests: The requests, with a `Refusal` in the place of each bad line.
        repairs: How often each kind of repair was made; empty where the file needed none.
    """

    kind: str
    requests: list[Request | Refusal]
    repairs: Mapping[str, int]


def load(source: str | os.PathLike[str], rng: np.random.Generator) -> list[Request | Refusal]:
    """Return the requests of a preset, a public trace or a file.

    Options may follow a name or a path after a colon, separated by commas: "chat:rate=4,n=200",
    "azure_conv:n=1000,speed=2", "trace.jsonl:spread". `presets()` lists the presets, whose options are the
    keyword arguments of the function of that name; `TRACES` lists the public traces, which are looked for in
    the folder that CBRESEARCH_DATA names and else downloaded (see `fetch`). Options of a trace or a file are
    those of `read_trace`, which also says which files are read.

    Args:
        source: A preset's name, or a public trace's, or else a path; "./chat24" is the file where "chat24" is
            the preset. What is no path either is looked for in the folder that CBRESEARCH_DATA names.
        rng: Draws what a preset or an option leaves to chance; a plain file draws nothing.

    Returns:
        A `Refusal` that names the line, the value and the remedy in the place of each bad line.

    Raises:
        ValueError: There is no such preset or file, it holds no request at all, or an option is unknown or
            out of range; the message names the near misses.
    """
    name = os.fspath(source)
    base, _, options = name.partition(":")
    if base in PRESETS:
        preset = PRESETS[base]
        return list(preset(rng, **parse_options(base, options, keyword_options(preset))))
    return read_trace(name, rng).requests


def read_trace(
    source: str | os.PathLike[str],
    rng: np.random.Generator | None = None,
    *,
    n: int | None = None,
    speed: float = 1.0,
    rate: float | None = None,
    failures: str = "skip",
    spread: bool = False,
    tokens_per_id: int = mooncake.BLOCK_TOKENS,
) -> TraceFile:
    """Return the requests of a trace or a workload file, and what had to be repaired.

    What kind of file it is, its first line tells:

    - Azure 2023 (CSV): `TIMESTAMP` (UTC), `ContextTokens`, `GeneratedTokens`.
    - Vidur (CSV): `num_prefill_tokens`, `num_decode_tokens`, and mostly `arrived_at` (seconds).
    - BurstGPT (CSV): `Timestamp` (seconds), `Request tokens`, `Response tokens`; a `Session ID` becomes the
      client. Failed requests have 0 response tokens.
    - Mooncake (JSON lines): see `load_mooncake`; known by its `hash_ids`.
    - A workload file: one JSON object a line with the keys `id`, `arrival`, `prompt`, `max_tokens`,
      `priority`, `client`, `deadline` and those of `SamplingParams` except `num_logprobs`; only `prompt`
      (text, token ids, or a length in tokens) and `max_tokens` are needed, and null means not given. Times
      are seconds since the start of the run. A request without an id is named by its position, from "0".
      Blank lines are skipped.

    Requests of a trace run to their recorded length (`ignore_eos`). Of the CSV files, arrivals count from the
    earliest row, and `read_table` says which repairs are made.

    Args:
        source: A path or a name as `load` takes them, presets aside; options in it go before the arguments.
        rng: Draws what `rate` or `spread` leave to chance; needed only there.
        n: Read so many lines only.
        speed: Divide every interval by it, see `scale_rate`: 2 is twice the rate in half the time.
        rate: Requests per second of a Poisson process, for a Vidur file without arrivals, whose requests
            otherwise all come at 0.
        failures: What becomes of BurstGPT's failed requests: "skip" leaves them out and counts them, "refuse"
            puts a `Refusal` in their place.
        spread: Spread Mooncake's arrivals inside their ticks of 3 seconds, see `spread_arrivals`.
        tokens_per_id: Of a Mooncake trace, see `load_mooncake`.

    Raises:
        ValueError: There is no such file, it holds no request, or an option is out of range or not one of
            its kind.
    """
    name, given = _split(os.fspath(source))
    if given:
        options = {"n": n, "speed": speed, "rate": rate, "failures": failures}
        options |= {"spread": spread, "tokens_per_id": tokens_per_id}
        return read_trace(name, rng, **options | parse_options(name, given, keyword_options(read_trace)))
    if n is not None and (type(n) is not int or n < 1):
        raise ValueError(f"workload {name!r}: option n is {n!r}; it must be a whole number of at least 1")
    content = _content(name)
    chance = rng if rng is not None else np.random.default_rng(0)
    kind = table_of(content)
    if kind is None and name.lower().endswith(".csv"):
        raise ValueError(unknown_header(name, content))
    keys = first_keys(content) if kind is None else frozenset()
    if kind is None:
        kind = "mooncake" if "hash_ids" in keys and "prompt" not in keys else "workload"
    _check_kind(name, kind, rate=rate, failures=failures, spread=spread, tokens_per_id=tokens_per_id)
    if (rate is not None or spread) and rng is None:
        raise ValueError(f"workload {name!r}: rate and spread draw arrivals; give a random generator as rng")
    repairs: Mapping[str, int] = {}
    if kind == "workload":
        requests, example = parse(content, n=n), EXAMPLE
    elif kind == "mooncake":
        requests, example = parse(content, mooncake.form(tokens_per_id), n), mooncake.EXAMPLE
        if spread:
            requests = spread_arrivals(requests, chance, MOONCAKE_TICK)
    else:
        requests, repairs = read_table(content, kind, chance, n=n, rate=rate, failures=failures)
        example = "a row that the header describes"
    if speed != 1:
        requests = scale_rate(requests, speed)
    return TraceFile(kind, _at_least_one(name, requests, example), repairs)


def load_mooncake(
    source: str | os.PathLike[str], *, tokens_per_id: int = mooncake.BLOCK_TOKENS
) -> list[Request | Refusal]:
    """Return the requests of a Mooncake trace (JSON lines; Qin et al., FAST'25), in its order.

    A line holds `timestamp` (milliseconds), `input_length` and `output_length` (tokens) and `hash_ids`: one
    id for each 512 tokens of the prompt and one for the rest. Equal ids stand for equal tokens behind equal
    tokens; which tokens, nobody knows. Here they depend on the id alone, so prompts share KV just where
    their ids are equal. Other keys are ignored. Outputs run to their full length.

    A whole trace of long prompts takes gigabytes, 8 bytes a token. `tokens_per_id=1` turns each id into one
    token, so that a KV block of 1 token stands for 512: a prompt is then the tuple of its ids. That keeps
    hit rates, and makes a prompt's step time 512 times too small.

    Args:
        source: A path, or a name in the folder that CBRESEARCH_DATA names.
        tokens_per_id: Tokens that an id stands for, 1 to 512; prompts become shorter in proportion, outputs
            stay. From 4 on, all token ids are below 256, which every vocabulary has, and different ids have
            at most 3 tokens in common before they part; below 4 an id is its own token.

    Returns:
        A `Refusal` that names the line, the value and the remedy in the place of each bad line.

    Raises:
        ValueError: There is no such file, it holds no request, or `tokens_per_id` is out of range.
    """
    name, form = os.fspath(source), mooncake.form(tokens_per_id)
    return _at_least_one(name, parse(_content(name), form), form.example)


def find(name: str | os.PathLike[str]) -> Path | None:
    """Return where a file is: at this path, or of this name in the folder that CBRESEARCH_DATA names."""
    path, folder = Path(name), os.environ.get("CBRESEARCH_DATA")
    if os.fspath(name) and path.exists():
        return path
    if folder and os.fspath(name) and (Path(folder) / path).is_file():
        return Path(folder) / path
    return None


def _split(name: str) -> tuple[str, str]:
    """Return a name and the options behind it; a file whose own name has a colon goes first."""
    base, separator, options = name.rpartition(":")
    if separator and find(name) is None and (base in TRACES or find(base) is not None):
        return base, options
    return name, ""


def _check_kind(name: str, kind: str, **options: Any) -> None:
    """Refuse an option that says nothing about this kind of file."""
    kinds = {"rate": ("vidur_lengths",), "failures": ("burstgpt",)}
    kinds |= {"spread": ("mooncake",), "tokens_per_id": ("mooncake",)}
    defaults = {key: value.default for key, value in keyword_options(read_trace).items()}
    for key, value in options.items():
        if value != defaults[key] and kind not in kinds[key]:
            instead = "; scale its arrivals by speed" if key == "rate" else ""
            raise ValueError(
                f"workload {name!r} is of the kind {kind}, and option {key} is for {kinds[key][0]}{instead}"
            )


def _content(name: str) -> bytes:
    if name.lower().endswith(_UNREAD_ENDINGS):
        raise ValueError(
            f"workload {name!r}: files with this ending are not read; give a preset ({', '.join(PRESETS)}), "
            f"a CSV trace, or a JSON-lines file (.jsonl) with lines such as {EXAMPLE}"
        )
    path = fetch(name) if name in TRACES else find(name)
    if path is None:
        known = [*PRESETS, *TRACES]
        base = name.partition(":")[0]
        raise ValueError(f"workload {name!r} is neither a preset nor a file; {suggestion(base, known)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"workload {name!r} cannot be read: {error.strerror}; name a file") from error


def _at_least_one(name: str, requests: list[Request | Refusal], example: str) -> list[Request | Refusal]:
    if not requests:
        raise ValueError(f"workload {name!r} is empty; write one request a line, such as {example}")
    return requests
