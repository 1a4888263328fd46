"""Text generation with language models."""

from pax_export.generation import samplers
from pax_export.generation._beams import Beams, beam_search
from pax_export.generation._cache import prefill
from pax_export.generation._export import export
from pax_export.generation._generate import Generated, Stream, generate
from pax_export.generation._pretrained import from_pretrained, save_pretrained
from pax_export.generation._speculate import speculate
from pax_export.generation._tokenizer import Tokenizer

__all__ = [
    "Beams",
    "Generated",
    "Stream",
    "Tokenizer",
    "beam_search",
    "export",
    "from_pretrained",
    "generate",
    "prefill",
    "samplers",
    "save_pretrained",
    "speculate",
]
