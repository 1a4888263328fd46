"""Sharding of modules: rules for partition specs, placement, planning."""

from pax_export._foundations.hlo import Collective, Cost, collectives, cost, sent_bytes
from pax_export.sharding._leaf_shardings import following, shardings
from pax_export.sharding._leaf_shardings import shardings_of_leaves as shardings_of_leaves
from pax_export.sharding._mesh import abstract_mesh, make_mesh
from pax_export.sharding._presets import data_parallel, fully_sharded, tensor_parallel
from pax_export.sharding._rules import Rules
from pax_export.sharding._rules import RulesLike as RulesLike
from pax_export.sharding._shard import gather, init, keep, shard, shard_batch
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
    "sent_bytes",
    "shard",
    "shard_batch",
    "shardings",
    "table",
    "tensor_parallel",
]
