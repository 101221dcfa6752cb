"""A stand-in for FlashAttention 2, 3 and 4: code that imports them runs on fastattention, when asked to.

    import fastattention.integrations.flash_attn
    fastattention.integrations.flash_attn.install()

    from flash_attn import flash_attn_func                      # FlashAttention-2: fast_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn_interface import flash_attn_with_kvcache    # FlashAttention-3
    from flash_attn.cute import flash_attn_varlen_func          # FlashAttention-4

flash2.py    FlashAttention-2: fastattention's functions take the same arguments in the same order
flash3.py    FlashAttention-3's order of arguments
flash4.py    FlashAttention-4's order of arguments
arguments.py reads and refuses arguments of versions 3 and 4

Importing this package installs nothing. Code that looks for an installed distribution, such as "flash-attn", instead
of importing the module does not find one; Transformers does so for attn_implementation="flash_attention_2". Use
`fastattention.integrations.transformers` there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

from fastattention.errors import FastAttentionError
from fastattention.integrations.flash_attn import flash2, flash3, flash4
from fastattention.integrations.flash_attn.flash2 import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)

__all__ = ["index_first_axis", "index_put_first_axis", "install", "pad_input", "uninstall", "unpad_input"]


def install() -> None:
    """Puts the modules of FlashAttention 2, 3 and 4 into sys.modules.

    - FlashAttention-2: flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding
    - FlashAttention-3: flash_attn_interface
    - FlashAttention-4: flash_attn.cute and flash_attn.cute.interface

    They hide installed ones from later imports. Installing twice changes nothing.

    Raises FastAttentionError when another flash_attn or flash_attn_interface has been imported: code may already hold
    its functions.
    """
    for name in ("flash_attn", "flash_attn_interface"):
        present = sys.modules.get(name)
        if present is not None and present not in _installed:
            raise FastAttentionError(
                f"{name} is already imported, from {getattr(present, '__file__', None) or 'an unknown place'}; "
                "call install() before anything imports it, or remove it"
            )
    if "flash_attn" not in sys.modules:
        _installed[:] = _modules()
        sys.modules.update({module.__name__: module for module in _installed})


def uninstall() -> None:
    """Takes the modules out of sys.modules again; functions already imported from them go on working."""
    for module in _installed:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]
    _installed.clear()


_installed: list[ModuleType] = []


def _modules() -> list[ModuleType]:
    """The modules that `install` lists."""
    padding = (index_first_axis, index_put_first_axis, pad_input, unpad_input)
    cute_interface = _module("flash_attn.cute.interface", flash4.INTERFACE)
    submodules = {
        "flash_attn_interface": _module("flash_attn.flash_attn_interface", flash2.INTERFACE),
        "bert_padding": _module("flash_attn.bert_padding", {function.__name__: function for function in padding}),
        "cute": _module("flash_attn.cute", {**flash4.INTERFACE, "interface": cute_interface, "__path__": []}),
    }
    package = _module("flash_attn", {**flash2.INTERFACE, **submodules, "__version__": flash2.VERSION, "__path__": []})
    return [package, *submodules.values(), cute_interface, _module("flash_attn_interface", flash3.INTERFACE)]


def _module(name: str, members: Mapping[str, object]) -> ModuleType:
    module = ModuleType(name, f"{name} as provided by fastattention.")
    # importlib.util.find_spec refuses modules without a spec.
    module.__spec__ = ModuleSpec(name, loader=None, origin="fastattention", is_package="__path__" in members)
    vars(module).update(members)
    return module
