"""Reads LoRA adapter folders in PEFT's format, before an engine sees them.

Nothing in a folder is run. Known fields of the configuration are read as JSON. The header of the
safetensors file gives the names, shapes and types of the tensors. The tensors are loaded last, one
by one, to check that they are finite.

The tensors say which modules are adapted. Patterns in the configuration are only used to find
modules that the file lacks, and are matched for a limited time.

An engine calls :func:`read_adapter`, then :meth:`AdapterFolder.require` with the features that it
applies, :meth:`AdapterFolder.require_modules` with :func:`module_shapes` of its model, and
:func:`read_tensor` for the two matrices of each of the folder's modules.
"""

from genlm.kit.adapter_files.config import CONFIG, MAX_CONFIG_BYTES, read_config
from genlm.kit.adapter_files.features import Feature
from genlm.kit.adapter_files.folder import PREFIX, WEIGHTS, AdapterFolder, LoraModule, find_adapter
from genlm.kit.adapter_files.names import ends, kind
from genlm.kit.adapter_files.plain import write_plain
from genlm.kit.adapter_files.reading import read_adapter
from genlm.kit.adapter_files.settings import SCALE, Settings, is_scale
from genlm.kit.adapter_files.shapes import (
    module_shapes,
    presumed_shapes,
    shapes_in_transformers,
)
from genlm.kit.adapter_files.tensors import (
    MAX_HEADER_BYTES,
    Tensor,
    read_header,
    read_tensor,
    require_finite,
)

__all__ = [
    "CONFIG",
    "MAX_CONFIG_BYTES",
    "MAX_HEADER_BYTES",
    "PREFIX",
    "SCALE",
    "WEIGHTS",
    "AdapterFolder",
    "Feature",
    "LoraModule",
    "Settings",
    "Tensor",
    "ends",
    "find_adapter",
    "is_scale",
    "kind",
    "module_shapes",
    "presumed_shapes",
    "read_adapter",
    "read_config",
    "read_header",
    "read_tensor",
    "require_finite",
    "shapes_in_transformers",
    "write_plain",
]
