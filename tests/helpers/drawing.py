"""What the tests of workloads share: a random generator, and how far drawn numbers are off their mean."""

import math

import numpy as np


def rng(seed=0):
    return np.random.default_rng(seed)


def standard_errors_off(values, mean):
    return abs(np.mean(values) - mean) / (np.std(values, ddof=1) / math.sqrt(len(values)))
