"""The backend ``rnn`` of genlm-core: recurrent networks in NumPy."""
