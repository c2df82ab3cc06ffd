"""Several replicas behind a router, each with its own scheduler, blocks and step time, on one clock."""

from cbresearch.cluster.replica import Replica, ReplicaConfig
from cbresearch.cluster.routers import LeastKv, LeastOutstanding, PrefixAffinity, RoundRobin, Router
from cbresearch.cluster.run import ClusterRun, Handover, Route, simulate_cluster

__all__ = [
    "ClusterRun",
    "Handover",
    "LeastKv",
    "LeastOutstanding",
    "PrefixAffinity",
    "Replica",
    "ReplicaConfig",
    "RoundRobin",
    "Route",
    "Router",
    "simulate_cluster",
]
