"""LoRA and DoRA adapters: low-rank updates of frozen layers."""

from pax_export.adapters._layer import lora, weight_of
from pax_export.adapters._lora import LoRA
from pax_export.adapters._net import activate, add, merge, names, pad_ranks, remove, unmerge
from pax_export.adapters._net import apply_changes as apply_changes
from pax_export.adapters._net import chosen_modules as chosen_modules
from pax_export.adapters._save_load import load, save

__all__ = [
    "LoRA",
    "activate",
    "add",
    "load",
    "lora",
    "merge",
    "names",
    "pad_ranks",
    "remove",
    "save",
    "unmerge",
    "weight_of",
]
