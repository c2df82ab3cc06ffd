"""Checks that configurations share."""

from operator import index

_OPTIONAL = (
    "max_model_len",
    "vocab_size",
    "sliding_window",
    "value_head_dim",
    "latent_dim",
    "max_num_requests",
    "max_num_tokens",
)


def require_positive(owner: object, *names: str) -> None:
    """Turn the named counts of a configuration into plain ints, whatever integer types they came as."""
    for name in names:
        value = getattr(owner, name)
        if value is None and name in _OPTIONAL:
            continue
        try:
            count = None if isinstance(value, bool) else index(value)
        except TypeError:
            count = None
        if count is None or count < 1:
            raise ValueError(
                f"{type(owner).__name__}: {name} is {value!r}; it must be an integer of at least 1"
            )
        object.__setattr__(owner, name, count)
