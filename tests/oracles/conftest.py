"""Other libraries as the oracle: transformers, torch and peft, in `tox -e oracles`.

Without them nothing here is collected; CI keeps small recorded numbers in the tests of each room.
"""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if all(map(find_spec, ("torch", "transformers", "peft"))) else ["test_*.py"]
)
