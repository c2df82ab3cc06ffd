"""Load a workload: a preset, a public trace (downloaded once and checked) or a file."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from cbresearch import names
from cbresearch.checks import count
from cbresearch.request import Rejected, Request
from cbresearch.workloads import readers
from cbresearch.workloads.arrivals import Poisson, scale_rate, spread_arrivals
from cbresearch.workloads.common import Rng, checked_rng
from cbresearch.workloads.presets import PRESETS

# The first bytes of what is no text, what it is, and what to do.
_NO_TEXT = {
    b"version https://git-lfs": "a Git LFS pointer; run git lfs pull, or download the file itself",
    b"<": "a web page; download the file itself, on GitHub behind the button Raw",
    b"\xff\xfe\0\0": "text in UTF-32; save it in UTF-8",
    b"\0\0\xfe\xff": "text in UTF-32; save it in UTF-8",
    b"\xff\xfe": "text in UTF-16; save it in UTF-8",
    b"\xfe\xff": "text in UTF-16; save it in UTF-8",
    b"PAR1": "a Parquet file; write it as CSV, by pandas.read_parquet and to_csv",
    b"PK\x03\x04": "a ZIP archive or a workbook; unpack it, or save it as CSV",
    b"(\xb5/\xfd": "packed by zstd; unpack it with unzstd",
}

# A text has no such byte near its start, and not so many of 0 in its first line.
_BINARY = re.compile(rb"\A.{0,11}[\0-\x08\x0e-\x1a\x1c-\x1f]|\A[\x80-\xc1\xf5-\xff]|\0{4}", re.DOTALL)

# Which kinds an option is for.
_KINDS = {
    "rate": ("vidur_lengths", "sharegpt", "openai_batch"),
    "failures": ("burstgpt",),
    "spread": ("mooncake",),
    "tokens_per_id": ("mooncake", "qwen"),
}

MOONCAKE_TICK = 3.0
"""Seconds to which the arrivals of Mooncake's conversation trace are rounded."""


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


def _published(name: str, sha256: str) -> PublicTrace:
    maker, _, part = name.partition("_")
    file = f"AzureLLMInferenceTrace_{part}.csv" if maker == "azure" else f"{name}_trace.jsonl"
    return PublicTrace(file, _ADDRESSES[maker].format(part), sha256)


_GITHUB = "https://raw.githubusercontent.com"
_ADDRESSES = {
    "azure": f"{_GITHUB}/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_{{}}.csv",
    "mooncake": f"{_GITHUB}/kvcache-ai/Mooncake/main/FAST25-release/traces/{{}}_trace.jsonl",
}
_SHA256 = {
    "azure_conv": "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    "azure_code": "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    "mooncake_conversation": "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "mooncake_synthetic": "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
}
TRACES: Mapping[str, PublicTrace] = MappingProxyType(
    {name: _published(name, _SHA256[name]) for name in _SHA256}
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
        kind: "workload", "mooncake", "qwen", "sharegpt", "openai_batch", "azure", "burstgpt", "vidur", or
            "vidur_lengths" (without arrivals).
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
    name = _name(source)
    if name.partition(":")[0] in PRESETS:
        factories = {key: partial(preset, checked_rng(rng)) for key, preset in PRESETS.items()}
        made = list(names.build("workload", name, factories))
        if not made:
            raise ValueError(f"workload {name!r} has no requests; ask for at least 1")
        return made
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
    tokens_per_id: int | None = None,
) -> TraceFile:
    """Return the requests of a trace or a workload file, and what had to be repaired.

    The header or the keys tell what kind of file it is:

    - Azure 2023 (CSV): `TIMESTAMP` (UTC, or with an offset), `ContextTokens`, `GeneratedTokens`.
    - Vidur (CSV): `num_prefill_tokens`, `num_decode_tokens`, and mostly `arrived_at` (seconds).
    - BurstGPT (CSV): `Timestamp` (seconds), `Request tokens`, `Response tokens`; a `Session ID` becomes the
      client. Failed requests have 0 response tokens.
    - Mooncake (JSON), known by its `hash_ids`: `timestamp` (milliseconds), `input_length` and
      `output_length` (tokens) and one id for each 512 tokens of the prompt and one for the rest. Equal ids
      stand for equal tokens behind equal tokens, which are not published. Here they depend on the id alone,
      so prompts share KV just where their ids are equal. Other keys are ignored.
    - Qwen (JSON), known by its `chat_id`: as Mooncake, with seconds, and an id for each 16 tokens.
    - ShareGPT (JSON), known by its `conversations`: the prompt is all text before the first answer to a user,
      with blank lines between; the output is as long as that answer, at 4 bytes a token. All arrive at 0.
    - An OpenAI batch file (JSON), known by `body`: the prompt is the text of `messages`, with blank lines
      between and without a chat template; `max_tokens` is needed. Sampling parameters that are not given have
      their defaults here, and other keys are ignored. All arrive at 0.
    - A workload file (JSON): objects with the keys `id`, `arrival`, `prompt`, `max_tokens`,
      `priority`, `client`, `deadline` and those of `SamplingParams` except `num_logprobs`; only `prompt`
      (text, token ids, or a length in tokens) and `max_tokens` are needed, and null means not given. Times
      are seconds since the start of the run. A request without an id is named by its position, from "0".

    JSON is one object a line, an array, or objects one behind another. The columns of CSV may be parted by
    semicolons or tabs. A file may be packed by gzip, bzip2 or xz, whatever its name. Blank lines are skipped,
    and byte order marks and line ends of CRLF accepted. Requests of a trace run to their recorded length
    (`ignore_eos`). Of the CSV files, arrivals count from the earliest row, and two repairs are counted: rows
    out of order are sorted by arrival, and failed requests are left out.

    No digit of a file's times is lost. Where the earliest arrival is 10^9 or more, times count from 1970, in
    seconds, milliseconds, microseconds or nanoseconds, as their digits tell, and arrivals begin at 0.

    A whole Mooncake trace of long prompts takes gigabytes, 8 bytes a token. `tokens_per_id=1` turns each id
    into one token, so that a KV block of 1 token stands for 512: a prompt is then the tuple of its ids. That
    keeps hit rates, and makes a prompt's step time 512 times too small.

    Args:
        source: A path, or a public trace's name, or a name in the folder that CBRESEARCH_DATA names.
        rng: Draws what `rate` or `spread` leave to chance; needed only there.
        n: Read so many requests only.
        speed: Divide every interval by it, see `scale_rate`: 2 is twice the rate in half the time.
        rate: Requests per second of a Poisson process, for a file without arrivals (Vidur's, ShareGPT, OpenAI
            batches), whose requests otherwise all arrive at 0.
        failures: What becomes of BurstGPT's failed requests: "skip" leaves them out and counts them, "reject"
            puts a `Rejected` in their place.
        spread: Spread Mooncake's arrivals inside their ticks of 3 seconds, see `spread_arrivals`.
        tokens_per_id: Tokens that an id of a Mooncake or a Qwen trace stands for; by default, and at most,
            those of its block, 512 or 16. Prompts become shorter in proportion, outputs stay. From 8 on (from
            4 on for ids below 2^32), all token ids are below 256, which every vocabulary has, and different
            ids have at most 7 (3) tokens in common before they part; below, an id is its own token.

    Raises:
        ValueError: No such file exists, it holds no request, or an option is out of range or not one of its
            kind.
    """
    name = _name(source)
    n = None if n is None else count(f"workload {name!r}: option n", n)
    content = _content(name)
    kind = readers.kind_of(name, content)
    given = (rate is not None, failures != "skip", spread, tokens_per_id is not None)
    for (option, kinds), is_given in zip(_KINDS.items(), given, strict=True):
        if is_given and kind not in kinds:
            instead = "; scale its arrivals by speed" if option == "rate" else ""
            where = f"{option} is for {' or '.join(kinds)}{instead}"
            raise ValueError(f"workload {name!r} is of the kind {kind}; {where}")
    requests, repairs = readers.read(content, kind, n, tokens_per_id, failures)
    if not requests:
        raise ValueError(f"workload {name!r} is empty; {readers.remedy_for(kind)}")
    if rate is not None:
        times = Poisson(rate)(checked_rng(rng), len(requests)).tolist()
        requests = [request.moved(time) for request, time in zip(requests, times, strict=True)]
    if spread:
        requests = spread_arrivals(requests, checked_rng(rng), MOONCAKE_TICK)
    return TraceFile(kind, scale_rate(requests, speed) if speed != 1 else requests, repairs)


def find(name: str | os.PathLike[str]) -> Path | None:
    """Return where a file is: at this path, or of this name in the folder that CBRESEARCH_DATA names."""
    name, folder = os.path.expanduser(_name(name)), os.environ.get("CBRESEARCH_DATA")
    paths = [Path(name), Path(os.path.expanduser(folder)) / name] if folder else [Path(name)]
    return next((path for path in paths if name and os.path.exists(path)), None)


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
    if name not in TRACES:
        raise ValueError(f"unknown trace {name!r}; {names.suggestion(name, TRACES)}")
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
        by_hand = f"download {trace.url} into the folder that CBRESEARCH_DATA names, as {trace.file}"
        raise ValueError(f"trace {name!r} cannot be downloaded: {error}; {install}{by_hand}") from error
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _name(source: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(source)
    except TypeError:
        raise ValueError(f"the workload is {source!r}; give a name such as 'chat24', or a path") from None


def _content(name: str) -> bytes:
    path = fetch(name) if name in TRACES else find(name)
    if path is None:
        near = names.suggestion(name.partition(":")[0], [*PRESETS, *TRACES])
        raise ValueError(f"workload {name!r} is neither a preset nor a file; {near}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"workload {name!r} cannot be read: {error.strerror}; name a file") from error
    try:
        # Some files are packed twice.
        for _ in range(3):
            # Imported where they are needed: some builds of Python lack one.
            if content.startswith(b"\x1f\x8b"):
                import gzip

                content = gzip.decompress(content)
            elif content.startswith(b"BZh"):
                import bz2

                content = bz2.decompress(content)
            elif content.startswith(b"\xfd7zXZ\x00"):
                import lzma

                content = lzma.decompress(content)
    # What an unpacker raises is up to it; whatever it is, the remedy is the same.
    except Exception as error:
        remedy = "the file was cut or spoilt, fetch it again"
        raise ValueError(f"workload {name!r} cannot be unpacked: {error}; {remedy}") from error
    first = content.partition(b"\n")[0].rstrip(b"\r")
    said = [said for start, said in _NO_TEXT.items() if content.lstrip().startswith(start)]
    said += ["text in UTF-16, or binary; save it as text in UTF-8"] * (b"\0" in content[:2])
    said += ["no text, but binary, such as an image; save it as text"] * bool(_BINARY.search(first, 0, 1024))
    said += ["text with line ends of CR alone; save it with those of LF"] * (b"\r" in first)
    if said:
        raise ValueError(f"workload {name!r} is {said[0]}")
    return content
