"""Read whom to serve, from a preset or a file."""

import os
from pathlib import Path

import numpy as np

from cbresearch.request import Refusal, Request
from cbresearch.workloads import mooncake
from cbresearch.workloads.lines import EXAMPLE, first_keys, parse, suggestion
from cbresearch.workloads.named import PRESETS

_UNREAD_ENDINGS = (".csv", ".tsv", ".parquet", ".xlsx", ".gz", ".zip", ".zst")


def load(source: str | os.PathLike[str], rng: np.random.Generator) -> list[Request | Refusal]:
    """Return the requests of a preset or of a file, in its order.

    A workload file holds one JSON object a line with the keys `id`, `arrival`, `prompt`, `max_tokens`,
    `priority`, `client`, `deadline` and those of `SamplingParams` except `num_logprobs`; only `prompt` (text,
    token ids, or a length in tokens) and `max_tokens` are needed, and null means not given. Times are
    seconds since the start of the run. A request without an id is named by its position, from "0". Blank
    lines are skipped.

    A Mooncake trace is known by its `hash_ids`, and read as `load_mooncake` does by default.

    Args:
        source: A preset's name, or else a path; "./chat24" is the file where "chat24" is the preset. What
            is no path either is looked for in the folder that CBRESEARCH_DATA names.
        rng: Draws what a preset leaves to chance; a file draws nothing.

    Returns:
        A `Refusal` that names the line, the value and the remedy in the place of each bad line.

    Raises:
        ValueError: There is no such preset or file, or it holds no request at all.
    """
    name = os.fspath(source)
    if name in PRESETS:
        return list(PRESETS[name](rng))
    if name.lower().endswith(_UNREAD_ENDINGS):
        formats = (
            f"a preset ({', '.join(PRESETS)}) or a JSON-lines file (.jsonl) with lines such as {EXAMPLE}"
        )
        raise ValueError(f"workload {name!r}: files with this ending are not read; give {formats}")
    content = _content(name)
    keys = first_keys(content)
    form = mooncake.form() if "hash_ids" in keys and "prompt" not in keys else None
    return _at_least_one(name, parse(content, form), form.example if form else EXAMPLE)


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


def _content(name: str) -> bytes:
    path = find(name)
    if path is None:
        raise ValueError(f"workload {name!r} is neither a preset nor a file; {suggestion(name, PRESETS)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"workload {name!r} cannot be read: {error.strerror}; name a file") from error


def _at_least_one(name: str, requests: list[Request | Refusal], example: str) -> list[Request | Refusal]:
    if not requests:
        raise ValueError(f"workload {name!r} is empty; write one request a line, such as {example}")
    return requests
