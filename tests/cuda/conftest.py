"""This folder is not a package, because one named `cuda` would hide NVIDIA's; its neighbours are found through sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
