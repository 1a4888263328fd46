"""Makes `pax_export` see the calls of another system: ``sitecustomize.py`` calls `pretend`."""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import os
import pathlib
import signal
import sys
import types

#: What typeshed has for other systems alone.
POSIX = """
    O_NONBLOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_SYNC statvfs fstatvfs geteuid getuid getgid
    seteuid killpg getpgid setsid fork forkpty wait pread preadv pwrite pwritev mkfifo mknod chown
    lchown sched_getaffinity register_at_fork sysconf pathconf uname getloadavg fchdir sync pipe2
    posix_fadvise posix_fallocate sendfile memfd_create
""".split()


class Masked(types.ModuleType):
    """A module without some of its names, and with others of its own."""

    def __init__(self, module, hidden, **own):
        super().__init__(module.__name__)
        self.__dict__.update(own)
        self.module, self.hidden = module, hidden

    def __getattr__(self, name):
        if name in self.hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} here")
        return getattr(self.module, name)


def open_(path, flags, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "a directory", path)
    return os.open(path, flags, *arguments, **options)


def fsync(number):
    if not fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
        raise OSError(errno.EBADF, "open for reading only")
    os.fsync(number)


def no_library(name, *arguments, **options):
    raise TypeError("bad argument type for built-in operation")


def library(name, *arguments, **options):
    return Masked(types.ModuleType("libc"), ["renameat2"])


def refuse_open(path):
    """Windows neither renames nor removes what somebody has open, or what holds it."""
    for number in os.listdir("/proc/self/fd"):
        try:
            opened = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if pathlib.Path(opened).is_relative_to(os.path.abspath(path)):
            raise PermissionError(errno.EACCES, "a file is open", opened)


def strict(method, replaces):
    def checked(self, *arguments, **options):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("pax_export"):
            refuse_open(self)
            if arguments and os.path.lexists(arguments[0]):
                if not replaces or os.path.isdir(arguments[0]):
                    raise FileExistsError(errno.EEXIST, "it is there", arguments[0])
                refuse_open(arguments[0])
        return method(self, *arguments, **options)

    return checked


def pretend(system):
    masked, missing = {"ctypes": Masked(ctypes, [], CDLL=library)}, []
    if system == "windows":
        masked = {
            "ctypes": Masked(ctypes, [], CDLL=no_library),
            "os": Masked(os, POSIX, name="nt", open=open_, fsync=fsync, O_BINARY=0),
            "signal": Masked(signal, ["SIGKILL", "SIGALRM", "setitimer", "pthread_kill"]),
        }
        missing = ["fcntl", "resource", "pwd", "grp", "termios", "pty"]
        for name, replaces in {"rename": False, "replace": True, "unlink": False}.items():
            setattr(pathlib.Path, name, strict(getattr(pathlib.Path, name), replaces))
    import_ = builtins.__import__

    def import_there(name, globals=None, locals=None, fromlist=(), level=0):
        if not level and globals and globals.get("__name__", "").startswith("pax_export"):
            if name in missing:
                raise ImportError(f"{system} has no {name}")
            if name in masked:
                return masked[name]
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = import_there
