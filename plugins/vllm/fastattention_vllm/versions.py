"""The versions of vLLM that this plugin was tested with."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

# vLLM's attention interface is internal and changes between minor versions.
TESTED = ("0.32.0",)


def why_untested(version: str) -> str | None:
    """Why `version`, vLLM's own `__version__`, is not among the tested ones; None when it is.

    Local parts are ignored: 0.32.0+cpu is 0.32.0.
    """
    tested = ", ".join(TESTED)
    try:
        release = Version(version).public
    except InvalidVersion:
        release = version
    if release in TESTED:
        return None
    return f"fastattention-vllm was not tested with vLLM {version}; tested: {tested}"
