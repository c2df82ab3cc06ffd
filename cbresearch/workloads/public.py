"""Public traces by name: from the folder that CBRESEARCH_DATA names, or else downloaded and checked."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"


class PublicTrace(NamedTuple):
    """A trace that somebody published.

    Attributes:
        file: Its name in the folder of CBRESEARCH_DATA and in the cache.
        url: Where it is published.
        sha256: The hash of its bytes.
        about: What it is, under which licence, and whom to cite.
    """

    file: str
    url: str
    sha256: str
    about: str


TRACES: Mapping[str, PublicTrace] = MappingProxyType(
    {
        "azure_conv": PublicTrace(
            "AzureLLMInferenceTrace_conv.csv",
            f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            "an hour of conversations at Azure, 2023; CC-BY 4.0; Patel et al., Splitwise, ISCA 2024",
        ),
        "azure_code": PublicTrace(
            "AzureLLMInferenceTrace_code.csv",
            f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            "an hour of code completion at Azure, 2023; CC-BY 4.0; Patel et al., Splitwise, ISCA 2024",
        ),
        "mooncake_conversation": PublicTrace(
            "mooncake_conversation_trace.jsonl",
            f"{_MOONCAKE}/conversation_trace.jsonl",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            "an hour of conversations at Kimi; Apache-2.0; Qin et al., Mooncake, FAST'25",
        ),
        "mooncake_synthetic": PublicTrace(
            "mooncake_synthetic_trace.jsonl",
            f"{_MOONCAKE}/synthetic_trace.jsonl",
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            "a mix of public data sets; Apache-2.0; Qin et al., Mooncake, FAST'25",
        ),
    }
)
"""The public traces that are known by name."""

Downloader = Callable[[str, str, object], None]
"""Writes what is at an address into a file; pooch's own by default."""


def fetch(name: str, downloader: Downloader | None = None) -> Path:
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
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != trace.sha256:
            raise ValueError(
                f"trace {name!r}: {path} has the SHA-256 {found[:12]}…, the published file "
                f"{trace.sha256[:12]}…; replace it, or load it by its path"
            )
        return path
    cached = Path(os.environ.get("CBRESEARCH_CACHE") or Path.home() / ".cache" / "cbresearch") / "traces"
    by_hand = f"download {trace.url} into a folder as {trace.file}, and name the folder in CBRESEARCH_DATA"
    try:
        import pooch
    except ImportError:
        path = cached / trace.file
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == trace.sha256:
            return path
        raise ValueError(
            f"trace {name!r} has to be downloaded, and pooch, which would do that, is not installed; "
            f"pip install pooch, or {by_hand}"
        ) from None
    try:
        got = pooch.retrieve(
            trace.url, f"sha256:{trace.sha256}", fname=trace.file, path=cached, downloader=downloader
        )
    # What a downloader raises is up to it; whatever it is, the remedy is the same.
    except Exception as error:
        raise ValueError(f"trace {name!r} cannot be downloaded: {error}; {by_hand}") from error
    return Path(got)
