"""What a figure's artists hold."""

import numpy as np


def by_gid(ax, gid):
    """Return the artist of an axis with a group id, or None."""
    found = [artist for artist in ax.get_children() if artist.get_gid() == gid]
    assert len(found) <= 1
    return found[0] if found else None


def area_steps(collection):
    """Return the lower and the upper value of a filled area in each interval between its edges."""
    (path,) = collection.get_paths()
    x, y = path.vertices[:-1].T
    half = len(x) // 2
    # Two corners an interval, at its left and at its right edge, and the last edge once more.
    first, second = y[1:half][:-1:2], y[half + 1 :][::-1][:-1:2]
    return np.minimum(first, second), np.maximum(first, second)
