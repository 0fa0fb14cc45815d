"""The first checks on a GPU: tests of the core and the trie, conformance, quick figures.

Every figure is beside a floor of the same run: a step beside the raw model's, the trie beside a
copy on the device, a program beside genlm-backend's. ``--device cpu`` goes through the same code,
so that it can be tried anywhere; it is then ``--quick``, which takes small models and few contexts,
unless ``--no-quick`` is given.
"""
