"""Work in forks: what the parent has imported costs them nothing, and they may be killed."""

import os
import traceback


def in_fork(work):
    """Starts work in a process of its own; gives its number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def done(child):
    assert os.waitpid(child, 0)[1] == 0
