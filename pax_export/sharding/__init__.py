"""Modules on meshes of devices: rules for partition specs, placing, gathering, planning."""

from pax_export.sharding._batch import shard_batch
from pax_export.sharding._collectives import Collective, collectives, sent_bytes
from pax_export.sharding._cost import Cost, cost
from pax_export.sharding._following import following
from pax_export.sharding._init import init
from pax_export.sharding._keep import keep
from pax_export.sharding._mesh import abstract_mesh, make_mesh
from pax_export.sharding._placements import shardings
from pax_export.sharding._processes import processes
from pax_export.sharding._ready_made import data_parallel, fully_sharded, tensor_parallel
from pax_export.sharding._rules import Rules
from pax_export.sharding._shard import gather, shard
from pax_export.sharding._table import Row, Table, table

__all__ = [
    "Collective",
    "Cost",
    "Row",
    "Rules",
    "Table",
    "abstract_mesh",
    "collectives",
    "cost",
    "data_parallel",
    "following",
    "fully_sharded",
    "gather",
    "init",
    "keep",
    "make_mesh",
    "processes",
    "sent_bytes",
    "shard",
    "shard_batch",
    "shardings",
    "table",
    "tensor_parallel",
]
