"""The backend ``numpy`` of genlm-core: transformers in NumPy."""
