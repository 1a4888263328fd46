"""Compiled programs: a program of the compiler in, what it costs and what devices exchange out."""

from pax_export._hlo.collectives import Collective, collectives, sent_bytes
from pax_export._hlo.cost import Cost, cost
