"""JAX APIs for programs of several processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from pax_export._jax._private import private, say_less

_DEVICES = "jax._src.xla_bridge.backends_are_initialized"
_STATE = "jax._src.distributed.global_state"


class Joined(NamedTuple):
    """The connection of this process to the others."""

    client: Any  # the client of jax's coordination service, which also carries our messages
    coordinator: str  # the "host:port" of that service
    processes: int
    process: int  # which one this is


def devices_are_known() -> bool:
    """True once jax has looked for the devices of this machine."""
    known = private(_DEVICES)
    if known is None:
        say_less(_DEVICES)
        return False  # `jax.distributed.initialize` will ask, too
    return known()


def join_processes(*who: Any, within: float, lost_after: float) -> Joined | None:
    """`jax.distributed.initialize` without jax's abort if a process is lost; or None."""
    state = private(_STATE)
    if state is None or not hasattr(state, "client"):
        say_less(_STATE)
        jax.distributed.initialize(*who, initialization_timeout=int(within))
        return None
    try:
        jax.config.update("jax_enable_recoverability", True)
    except AttributeError:  # jax's error for unknown options
        say_less("the option jax_enable_recoverability")
    seconds = {"initialization_timeout": within, "heartbeat_timeout_seconds": lost_after}
    jax.distributed.initialize(*who, **{name: int(value) for name, value in seconds.items()})
    count, index = state.num_processes, state.process_id
    return Joined(state.client, str(state.coordinator_address), count, index)
