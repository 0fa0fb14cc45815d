"""Programs whose threads end while the interpreter is taken down, when their thread-local
destructors want the GIL. Python then refuses it by unwinding the thread, and a destructor must not
be unwound.
"""

from __future__ import annotations

import subprocess
import sys

#: Threads that call ``wait`` when they end.
BEGIN = """
import os, sys, threading
import __main__  # held by itself, or its objects would not be deleted
ends = []  # of their waiting

def wait():
    lock = threading.Lock()
    lock.acquire()
    ends.append(lock.release)
    lock.acquire()
"""
END = """
class Last:
    def __del__(
        self,
        ends=ends,
        exists=os.access,
        paths=[f"/proc/self/task/{thread.native_id}" for thread in threads],
    ):
        for end in ends:
            end()
        for path in paths:
            while exists(path, 0):
                pass

last = Last()
"""


def ended(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The outcome of such a program."""
    command = [sys.executable, "-c", BEGIN + program + END, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
