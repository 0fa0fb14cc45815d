"""Replicas of any backend on a Ray cluster. Importing it imports no engine, and not Ray."""

from genlm.ray.lm import AsyncRayLM

__all__ = ["AsyncRayLM"]
