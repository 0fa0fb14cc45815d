"""Programs whose thread ends while the interpreter is taken down, when its thread-local destructors
want the GIL. Python then refuses it by unwinding the thread, and a destructor must not be unwound.
"""

from __future__ import annotations

import subprocess
import sys

#: They name the lock that their thread waits for ``waiting``, and the thread ``thread``.
BEGIN = """
import os, sys, threading
import __main__  # held by itself, or its objects would not be deleted
waiting = threading.Lock()
waiting.acquire()
"""
END = """
class Last:
    def __del__(
        self, end=waiting.release, exists=os.access, thread=f"/proc/self/task/{thread.native_id}"
    ):
        end()
        while exists(thread, 0):
            pass

last = Last()
"""


def ended(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What became of such a program."""
    command = [sys.executable, "-c", BEGIN + program + END, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
