"""Closed forms for what static and continuous batching should give; `metrics` measures the same quantities.

`batching` counts steps, slots and seconds, `cost` money, `memory` bytes, `preemption` what making room costs,
`queueing` waits, `roofline` arithmetic, `rounding` its errors and the tokens that they flip, `sharing` what
prompts have in common. Forms without a paper are derived where they stand. Every function raises ValueError,
naming the argument and its value, if the value is out of range or the sample is empty.
"""

from cbresearch.formulas.batching import *  # noqa: F403
from cbresearch.formulas.checks import *  # noqa: F403
from cbresearch.formulas.cost import *  # noqa: F403
from cbresearch.formulas.memory import *  # noqa: F403
from cbresearch.formulas.preemption import *  # noqa: F403
from cbresearch.formulas.queueing import *  # noqa: F403
from cbresearch.formulas.roofline import *  # noqa: F403
from cbresearch.formulas.rounding import *  # noqa: F403
from cbresearch.formulas.sharing import *  # noqa: F403
from cbresearch.formulas.source import *  # noqa: F403
