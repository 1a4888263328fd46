"""Networks: ResNet, Transformer, and pretrained language models."""

from pax_export.nets._resnet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, ResNet200
from pax_export.nets._transformer import DenseBlock, Transformer
from pax_export.nets.decoder import (
    Decoder,
    DecoderCache,
    DecoderConfig,
    DecoderLayer,
    GenerationDefaults,
    Int8Store,
    LayerKind,
)
from pax_export.nets.decoder import PlacedReading as PlacedReading
from pax_export.nets.decoder import WrittenTensor as WrittenTensor
from pax_export.nets.decoder import cache_dtype as cache_dtype
from pax_export.nets.decoder import check_ids as check_ids
from pax_export.nets.decoder import config_of_gguf as config_of_gguf
from pax_export.nets.decoder import config_of_hf as config_of_hf
from pax_export.nets.decoder import file_tensors as file_tensors
from pax_export.nets.decoder import generation_config as generation_config
from pax_export.nets.decoder import gguf_metadata as gguf_metadata
from pax_export.nets.decoder import hf_config as hf_config
from pax_export.nets.decoder import hf_pieces as hf_pieces
from pax_export.nets.decoder import pieces_of_gguf as pieces_of_gguf
from pax_export.nets.decoder import read_placed as read_placed
from pax_export.nets.decoder import rotary_tensors as rotary_tensors

# Names that are imported but not in `__all__` are for other packages of pax_export.
__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "DecoderLayer",
    "GenerationDefaults",
    "Int8Store",
    "LayerKind",
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "ResNet200",
    "Transformer",
]
