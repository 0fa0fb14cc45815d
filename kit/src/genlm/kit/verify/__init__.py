"""The proof that an engine serves the model that a folder holds.

Each engine reads a model's folder in its own way. Here, the engine's rows are compared with those
that transformers computes from the same folder, in a process of its own. A plugin loads by
:func:`~genlm.kit.verify.loading.load_verified`; ``genlm verify`` prints what was compared.

Start with ``loading``, which shows the whole course. ``subject`` says what is verified.
``reference`` asks the process of ``transformers_rows``. ``contexts`` chooses the contexts,
``comparison`` compares their rows, and ``report`` judges the differences. ``copies`` asks the
engine for rows of a scaled copy, ``guilty`` looks for the setting that explains a difference, and
``known`` remembers proofs.
"""
