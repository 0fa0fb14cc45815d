"""Replicas of any backend on a Ray cluster. Importing it imports no engine, and not Ray."""

from genlm.ray.ending import end_fleet
from genlm.ray.lm import AsyncRayLM

__all__ = ["AsyncRayLM", "end_fleet"]
