"""The Ray session of a job; the pipelines use the same one."""

from pipelines.cluster import ray_session

__all__ = ["ray_session"]
