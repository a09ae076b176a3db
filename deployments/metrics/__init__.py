"""What the fleet tells about itself, for Prometheus: at /metrics, and through Ray's own metrics.

Each process keeps its metrics in a registry of its own. Replicas send theirs to the controller with
each renewal of their lease, so any ingress can answer for the whole cluster.
"""
