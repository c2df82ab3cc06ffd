"""Load a workload: a preset, a public trace (downloaded once and checked) or a file."""

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cbresearch import names
from cbresearch.request import Rejected, Request
from cbresearch.workloads import readers
from cbresearch.workloads.arrivals import scale_rate, spread_arrivals
from cbresearch.workloads.common import Rng, numbered_lines, require
from cbresearch.workloads.presets import PRESETS

_UNREAD_ENDINGS = (".tsv", ".parquet", ".xlsx", ".gz", ".zip", ".zst")

MOONCAKE_TICK = 3.0
"""Seconds to which the arrivals of Mooncake's conversation trace are rounded."""


_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"


class PublicTrace(NamedTuple):
    """A published trace.

    Attributes:
        file: Its name in the folder of CBRESEARCH_DATA and in the cache.
        url: Where it is published.
        sha256: The hash of its bytes.
    """

    file: str
    url: str
    sha256: str


TRACES: Mapping[str, PublicTrace] = MappingProxyType(
    {
        "azure_conv": PublicTrace(
            "AzureLLMInferenceTrace_conv.csv",
            f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        ),
        "azure_code": PublicTrace(
            "AzureLLMInferenceTrace_code.csv",
            f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        ),
        "mooncake_conversation": PublicTrace(
            "mooncake_conversation_trace.jsonl",
            f"{_MOONCAKE}/conversation_trace.jsonl",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        ),
        "mooncake_synthetic": PublicTrace(
            "mooncake_synthetic_trace.jsonl",
            f"{_MOONCAKE}/synthetic_trace.jsonl",
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        ),
    }
)
"""The public traces that are known by name.

- `azure_conv`, `azure_code`: an hour of conversations and of code completion at Azure, 2023; CC-BY 4.0; Patel
  et al., Splitwise, ISCA 2024.
- `mooncake_conversation`: an hour of conversations at Kimi; Apache-2.0; Qin et al., Mooncake, FAST'25.
- `mooncake_synthetic`: a mix of public data sets; Apache-2.0; Qin et al., Mooncake, FAST'25.
"""


class TraceFile(NamedTuple):
    """What a file held.

    Attributes:
        kind: "workload", "mooncake", "azure", "burstgpt", "vidur", or "vidur_lengths" (without arrivals).
        requests: The requests, with a `Rejected` in the place of each bad line.
        repairs: How often which repair was made, see `read_trace`; empty where the file needed none.
    """

    kind: str
    requests: list[Request | Rejected]
    repairs: Mapping[str, int]


def load(source: str | os.PathLike[str], rng: Rng) -> list[Request | Rejected]:
    """Return the requests of a preset, a public trace or a file.

    Options may follow a name or a path after a colon, separated by commas: "chat:rate=4,n=200",
    "azure_conv:n=1000,speed=2", "trace.jsonl:spread". `presets()` lists the presets, whose options are the
    keyword arguments of the function of that name; `TRACES` lists the public traces, which are looked for in
    the folder that CBRESEARCH_DATA names and else downloaded (see `fetch`). Options of a trace or a file are
    the keyword arguments of `read_trace`, which also says which files are read.

    Args:
        source: A preset's name, or a public trace's, or else a path; "./chat24" is the file where "chat24" is
            the preset. What is no path either is looked for in the folder that CBRESEARCH_DATA names.
        rng: Draws what a preset or an option leaves to chance; a plain file draws nothing.

    Returns:
        The requests, with a `Rejected` that names the line, the value and the remedy for each bad line.

    Raises:
        ValueError: No such preset or file exists, it holds no request at all, or an option is unknown or
            out of range; the message names the near misses.
    """
    name = os.fspath(source)
    if name.partition(":")[0] in PRESETS:
        return list(names.build("workload", name, {key: partial(PRESETS[key], rng) for key in PRESETS}))
    # A file whose own name has a colon goes first.
    path, colon, options = name.rpartition(":")
    if not colon or find(name) is not None or (path not in TRACES and find(path) is None):
        return read_trace(name, rng).requests
    label = Path(path).name
    return names.build("workload", f"{label}:{options}", {label: partial(read_trace, path, rng)}).requests


def read_trace(
    source: str | os.PathLike[str],
    rng: Rng | None = None,
    *,
    n: int | None = None,
    speed: float = 1.0,
    rate: float | None = None,
    failures: str = "skip",
    spread: bool = False,
    tokens_per_id: int = readers.BLOCK_TOKENS,
) -> TraceFile:
    """Return the requests of a trace or a workload file, and what had to be repaired.

    The first line tells what kind of file it is:

    - Azure 2023 (CSV): `TIMESTAMP` (UTC), `ContextTokens`, `GeneratedTokens`.
    - Vidur (CSV): `num_prefill_tokens`, `num_decode_tokens`, and mostly `arrived_at` (seconds).
    - BurstGPT (CSV): `Timestamp` (seconds), `Request tokens`, `Response tokens`; a `Session ID` becomes the
      client. Failed requests have 0 response tokens.
    - Mooncake (JSON lines), known by its `hash_ids`: `timestamp` (milliseconds), `input_length` and
      `output_length` (tokens) and one id for each 512 tokens of the prompt and one for the rest. Equal ids
      stand for equal tokens behind equal tokens, which are not published. Here they depend on the id alone,
      so prompts share KV just where their ids are equal. Other keys are ignored.
    - A workload file: one JSON object a line with the keys `id`, `arrival`, `prompt`, `max_tokens`,
      `priority`, `client`, `deadline` and those of `SamplingParams` except `num_logprobs`; only `prompt`
      (text, token ids, or a length in tokens) and `max_tokens` are needed, and null means not given. Times
      are seconds since the start of the run. A request without an id is named by its position, from "0".

    Blank lines are skipped, and byte order marks and line ends of CRLF accepted. Requests of a trace run to
    their recorded length (`ignore_eos`). Of the CSV files, arrivals count from the earliest row, and two
    repairs are counted: rows out of order are sorted by arrival, and failed requests are left out.

    A whole Mooncake trace of long prompts takes gigabytes, 8 bytes a token. `tokens_per_id=1` turns each id
    into one token, so that a KV block of 1 token stands for 512: a prompt is then the tuple of its ids. That
    keeps hit rates, and makes a prompt's step time 512 times too small.

    Args:
        source: A path, or a public trace's name, or a name in the folder that CBRESEARCH_DATA names.
        rng: Draws what `rate` or `spread` leave to chance; needed only there.
        n: Read so many lines only.
        speed: Divide every interval by it, see `scale_rate`: 2 is twice the rate in half the time.
        rate: Requests per second of a Poisson process, for a Vidur file without arrivals, whose requests
            otherwise all arrive at 0.
        failures: What becomes of BurstGPT's failed requests: "skip" leaves them out and counts them, "reject"
            puts a `Rejected` in their place.
        spread: Spread Mooncake's arrivals inside their ticks of 3 seconds, see `spread_arrivals`.
        tokens_per_id: Tokens that an id of a Mooncake trace stands for, 1 to 512; prompts become shorter in
            proportion, outputs stay. From 4 on, all token ids are below 256, which every vocabulary has, and
            different ids have at most 3 tokens in common before they part; below 4 an id is its own token.

    Raises:
        ValueError: No such file exists, it holds no request, or an option is out of range or not one of its
            kind.
    """
    name = os.fspath(source)
    require(n is None or n >= 1, f"workload {name!r}: option n", n, "it must be a whole number of at least 1")
    lines = numbered_lines(_content(name))
    kind = readers.kind_of(name, lines)
    given = {"rate": rate is not None, "failures": failures != "skip", "spread": spread}
    given["tokens_per_id"] = tokens_per_id != readers.BLOCK_TOKENS
    for option in filter(given.get, given):
        where = {"rate": "vidur_lengths", "failures": "burstgpt"}.get(option, "mooncake")
        if kind != where:
            instead = "; scale its arrivals by speed" if option == "rate" else ""
            raise ValueError(f"workload {name!r} is of the kind {kind}; {option} is for {where}{instead}")
    if rng is None and (rate is not None or spread):
        raise ValueError(f"workload {name!r}: rate and spread draw arrivals; give a random generator as rng")
    rng = rng if rng is not None else np.random.default_rng(0)
    example = readers.EXAMPLES.get(kind, "a row that the header describes")
    repairs: dict[str, int] = {}
    if kind in readers.TABLES:
        requests, repairs = readers.read_rows(lines[: n and n + 1], kind, rng, rate, failures)
    elif kind == "mooncake":
        is_possible = type(tokens_per_id) is int and 1 <= tokens_per_id <= readers.BLOCK_TOKENS
        require(is_possible, "tokens_per_id", tokens_per_id, f"it must be from 1 to {readers.BLOCK_TOKENS}")
        requests = readers.read_json(lines[:n], partial(readers.mooncake_request, tokens_per_id), example)
    else:
        requests = readers.read_json(lines[:n], readers.workload_request, example)
    if not requests:
        raise ValueError(f"workload {name!r} is empty; write one request a line, such as {example}")
    requests = spread_arrivals(requests, rng, MOONCAKE_TICK) if spread else requests
    return TraceFile(kind, scale_rate(requests, speed) if speed != 1 else requests, repairs)


def find(name: str | os.PathLike[str]) -> Path | None:
    """Return where a file is: at this path, or of this name in the folder that CBRESEARCH_DATA names."""
    folder, given = os.environ.get("CBRESEARCH_DATA"), os.path.expanduser(name)
    paths = [Path(given), Path(os.path.expanduser(folder)) / name] if folder else [Path(given)]
    return next((path for path in paths if os.fspath(name) and path.exists()), None)


def fetch(name: str, downloader: Callable[[str, str, object], None] | None = None) -> Path:
    """Return where a public trace lies, which is downloaded only if it is nowhere yet.

    It is looked for in the folder that CBRESEARCH_DATA names, then in `traces` of the cache folder
    (CBRESEARCH_CACHE, or `~/.cache/cbresearch`). Wherever it lies, its hash is checked.

    Args:
        name: A key of `TRACES`.
        downloader: Downloads in pooch's place, called as (address, path, pooch).

    Raises:
        ValueError: The file is not the published one, or cannot be had; the message says what to do.
    """
    trace = TRACES[name]
    folder = os.environ.get("CBRESEARCH_DATA")
    if folder and (path := Path(folder) / trace.file).is_file():
        if (found := _digest(path)) != trace.sha256:
            digests = f"has the SHA-256 {found[:12]}…, the published file {trace.sha256[:12]}…"
            raise ValueError(f"trace {name!r}: {path} {digests}; replace it, or load it by its path")
        return path
    cache = Path(os.environ.get("CBRESEARCH_CACHE") or Path.home() / ".cache" / "cbresearch") / "traces"
    path = cache / trace.file
    if path.is_file() and _digest(path) == trace.sha256:
        return path
    try:
        import pooch

        pooch.retrieve(trace.url, f"sha256:{trace.sha256}", trace.file, cache, downloader=downloader)
    # What a downloader raises is up to it; whatever it is, the remedy is the same.
    except Exception as error:
        install = "pip install pooch, or " if isinstance(error, ImportError) else ""
        by_hand = (
            f"download {trace.url} into a folder as {trace.file}, and name the folder in CBRESEARCH_DATA"
        )
        raise ValueError(f"trace {name!r} cannot be downloaded: {error}; {install}{by_hand}") from error
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _content(name: str) -> bytes:
    if name.lower().endswith(_UNREAD_ENDINGS):
        known = f"a preset ({', '.join(PRESETS)}), a CSV trace, or a JSON-lines file (.jsonl)"
        raise ValueError(f"workload {name!r}: files with this ending are not read; give {known}")
    path = fetch(name) if name in TRACES else find(name)
    if path is None:
        near = names.suggestion(name.partition(":")[0], [*PRESETS, *TRACES])
        raise ValueError(f"workload {name!r} is neither a preset nor a file; {near}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"workload {name!r} cannot be read: {error.strerror}; name a file") from error
