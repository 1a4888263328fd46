"""Decoder: pretrained language models, their caches and files.

`_decoder` is the net, `_layer` one layer of it, `_attend` reads a prompt or a token, and `_cache`
has keys and values. `_families` has a row for each family of models, `_config` what a net
computes. `_hf`, `_gguf`, `_fields`, `_loading` and `_placed` read files, `_to_hf` and `_to_gguf`
write them; `_names` says how files name arrays.
"""

from pax_export.nets.decoder._cache import DecoderCache, Int8Store
from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._decoder import Decoder
from pax_export.nets.decoder._fields import LayerKind
from pax_export.nets.decoder._generation_defaults import GenerationDefaults
from pax_export.nets.decoder._layer import DecoderLayer
from pax_export.nets.decoder._names import pieces_of_gguf as pieces_of_gguf
from pax_export.nets.decoder._placed import PlacedReading as PlacedReading
from pax_export.nets.decoder._placed import read_placed as read_placed
from pax_export.nets.decoder._sizes import cache_dtype as cache_dtype
from pax_export.nets.decoder._sizes import check_ids as check_ids
from pax_export.nets.decoder._to_gguf import config_of_gguf as config_of_gguf
from pax_export.nets.decoder._to_gguf import gguf_metadata as gguf_metadata
from pax_export.nets.decoder._to_gguf import rotary_tensors as rotary_tensors
from pax_export.nets.decoder._to_hf import WrittenTensor as WrittenTensor
from pax_export.nets.decoder._to_hf import config_of_hf as config_of_hf
from pax_export.nets.decoder._to_hf import file_tensors as file_tensors
from pax_export.nets.decoder._to_hf import generation_config as generation_config
from pax_export.nets.decoder._to_hf import hf_config as hf_config
from pax_export.nets.decoder._to_hf import hf_pieces as hf_pieces
