"""LoRA adapter folders in PEFT's format: what they hold, read before an engine sees them.

Nothing in a folder is run: the configuration is JSON, of which known fields are read, and the
header of a safetensors file gives the names, shapes and types of the tensors. They are loaded last,
one by one, to see that they are finite.
What the file holds says which modules are adapted. Expressions of the configuration say whether it
lacks some: they are compared with names for a limited time.

An engine calls :func:`read_adapter`, then :meth:`AdapterFolder.require` with the features that it
applies, :meth:`AdapterFolder.require_modules` with :func:`module_shapes` of its model, and
:func:`read_tensor` for the two matrices of each of the folder's modules.
"""

from genlm.kit.adapter_files.config import CONFIG, MOST_CONFIG, read_config
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
    MOST_HEADER,
    Tensor,
    read_header,
    read_tensor,
    require_finite,
)

__all__ = [
    "CONFIG",
    "MOST_CONFIG",
    "MOST_HEADER",
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
