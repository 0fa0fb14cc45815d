"""The proof that an engine serves the model that a folder holds.

Each engine reads a model's folder in its own way. Here its rows are compared with those that
transformers computes of the same folder, in a process of its own. A plugin loads by
:func:`~genlm.kit.verify.loading.load_verified`; ``genlm verify`` says what was compared.

``loading`` is the plot. ``subject`` says what is verified, ``reference`` asks the process that
``transformers_rows`` is, ``contexts`` chooses what is compared, ``comparison`` compares it and
``report`` judges it, ``copies`` asks the engine for rows of a scaled copy, ``guilty`` looks for the
setting that explains a difference, and ``known`` remembers proofs.
"""
