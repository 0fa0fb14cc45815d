"""LoRA adapter folders in PEFT's format: what they hold, read before an engine sees them.

Nothing in a folder is run and no tensor is loaded: the configuration is JSON, of which known fields
are read, and the header of a safetensors file gives the names, shapes and types of the tensors.
Regular expressions of the configuration are not run: what the file holds says which modules are
adapted.
"""

from genlm.core.engines.adapter_files.config import CONFIG, MOST_CONFIG, read_config
from genlm.core.engines.adapter_files.features import Feature
from genlm.core.engines.adapter_files.folder import WEIGHTS, AdapterFolder, LoraModule, find_adapter
from genlm.core.engines.adapter_files.names import ends
from genlm.core.engines.adapter_files.plain import write_plain
from genlm.core.engines.adapter_files.reading import read_adapter
from genlm.core.engines.adapter_files.settings import SCALE, Settings, is_scale
from genlm.core.engines.adapter_files.shapes import module_shapes, shapes_in_transformers
from genlm.core.engines.adapter_files.tensors import MOST_HEADER, Tensor, read_header, read_tensor

__all__ = [
    "CONFIG",
    "MOST_CONFIG",
    "MOST_HEADER",
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
    "module_shapes",
    "read_adapter",
    "read_config",
    "read_header",
    "read_tensor",
    "shapes_in_transformers",
    "write_plain",
]
