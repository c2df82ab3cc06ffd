"""Several replicas behind a router, each with its own scheduler, blocks and step time, on one clock."""

from cbresearch.cluster.replica import Replica, ReplicaConfig, Router, least_outstanding, round_robin
from cbresearch.cluster.run import ClusterRun, Handover, simulate_cluster

__all__ = [
    "ClusterRun",
    "Handover",
    "Replica",
    "ReplicaConfig",
    "Router",
    "least_outstanding",
    "round_robin",
    "simulate_cluster",
]
