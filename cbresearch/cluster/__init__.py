"""Several replicas behind a router, each with its own scheduler, blocks and step time, on one clock."""

from cbresearch.cluster.replica import Replica as Replica
from cbresearch.cluster.replica import ReplicaConfig as ReplicaConfig
from cbresearch.cluster.replica import Router as Router
from cbresearch.cluster.replica import least_outstanding as least_outstanding
from cbresearch.cluster.replica import round_robin as round_robin
from cbresearch.cluster.run import ClusterRun as ClusterRun
from cbresearch.cluster.run import Handover as Handover
from cbresearch.cluster.run import simulate_cluster as simulate_cluster
