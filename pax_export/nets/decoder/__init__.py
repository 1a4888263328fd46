"""Decoder: pretrained language models, their caches and files.

`_decoder` is the net, `_layer` one layer of it and what it attends to in a call, and `_cache` has
keys and values. `_config` is what a net computes, `_families` has a row for each family of models,
`_hf`, `_gguf` and `_generation` read settings, whose values `_fields` checks, and `_to_files`
writes them. `_tensors` says how files name and lay out arrays; `_loading` fills a net with them.
"""

from pax_export.nets.decoder._cache import DecoderCache, Int8Store
from pax_export.nets.decoder._checks import cache_dtype as cache_dtype
from pax_export.nets.decoder._checks import check_ids as check_ids
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._decoder import Decoder
from pax_export.nets.decoder._decoder import read_placed as read_placed
from pax_export.nets.decoder._fields import LayerKind
from pax_export.nets.decoder._generation import GenerationDefaults
from pax_export.nets.decoder._generation import generation_config as generation_config
from pax_export.nets.decoder._layer import DecoderLayer
from pax_export.nets.decoder._layer import PlacedReading as PlacedReading
from pax_export.nets.decoder._tensors import WrittenTensor as WrittenTensor
from pax_export.nets.decoder._tensors import file_tensors as file_tensors
from pax_export.nets.decoder._tensors import hf_pieces as hf_pieces
from pax_export.nets.decoder._tensors import pieces_of_gguf as pieces_of_gguf
from pax_export.nets.decoder._to_files import config_of_gguf as config_of_gguf
from pax_export.nets.decoder._to_files import config_of_hf as config_of_hf
from pax_export.nets.decoder._to_files import gguf_metadata as gguf_metadata
from pax_export.nets.decoder._to_files import hf_config as hf_config
from pax_export.nets.decoder._to_files import rotary_tensors as rotary_tensors
