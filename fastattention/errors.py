"""The exceptions of the package.

FastAttentionError
├── ArgumentError       an argument is wrong; also a ValueError. Nothing was computed and nothing was written.
├── UnsupportedError    the call is valid, but no backend here can serve it; also a NotImplementedError.
├── LibraryError        the native library is missing, damaged or of another version; also a RuntimeError.
├── CompileError        a kernel cannot be compiled here, or not launched; also a RuntimeError.
└── CacheFullError      a cache has no room within its memory budget, and is as it was; also a MemoryError.
"""

from __future__ import annotations


class FastAttentionError(Exception):
    """Base of every exception raised by fastattention."""


class ArgumentError(FastAttentionError, ValueError):
    """An argument is wrong. The message names the argument, what was given and what is allowed."""


class UnsupportedError(FastAttentionError, NotImplementedError):
    """No backend can serve a valid call. The message lists every backend with its reason."""


class LibraryError(FastAttentionError, RuntimeError):
    """The native library cannot be used. The message says why and what to do."""


class CompileError(FastAttentionError, RuntimeError):
    """A GPU kernel cannot be compiled or loaded. The message says why and what to do."""


class CacheFullError(FastAttentionError, MemoryError):
    """A cache has no room within its memory budget. The message says what to change; nothing was lost."""
