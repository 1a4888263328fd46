"""Cost and collectives of compiled programs."""

from pax_export._foundations.hlo.collectives import Collective, collectives, sent_bytes
from pax_export._foundations.hlo.cost import Cost, cost
