"""Replicas of any backend on a Ray cluster. Importing it imports neither an engine nor Ray."""

from genlm.ray.ending import end_fleet
from genlm.ray.lm import AsyncRayLM

__all__ = ["AsyncRayLM", "end_fleet"]
