"""Pictures of the pages, drawn from what a program really did: ``python -m tools.pictures``."""
