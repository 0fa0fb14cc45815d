"""A token: bytes with an id."""

from genlm.core import Token as Token
