"""A run in other forms: a Chrome trace for Perfetto, Prometheus text, one request's life in plain words."""

from cbresearch.export.explain import explain
from cbresearch.export.perfetto import Stay, stays_of, to_chrome, to_perfetto
from cbresearch.export.prometheus import prometheus

__all__ = ["Stay", "explain", "prometheus", "stays_of", "to_chrome", "to_perfetto"]
