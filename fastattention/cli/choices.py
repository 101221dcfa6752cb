"""Values of command line options. Light: parsing the command line imports nothing heavy."""

from __future__ import annotations

from enum import Enum


class AttnImplementation(str, Enum):
    """--attn: the implementation of attention inside a Transformers model."""

    EAGER = "eager"
    SDPA = "sdpa"
    FAST_ATTENTION = "fast_attention"


class ModelDtype(str, Enum):
    """--dtype: that of weights and activations; AUTO is the one in which the model was stored."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KernelDtype(str, Enum):
    """--dtype: that of q, k and v of the calls that a GPU kernel is for."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class CheckedDevice(str, Enum):
    """--device of check: the device that its list of calls runs on."""

    NPU = "npu"
    CUDA = "cuda"
    CPU = "cpu"


class CacheFormat(str, Enum):
    """--cache: what a quantized cache holds."""

    INT8 = "int8"
    FLOAT8 = "float8"


class ToolFormat(str, Enum):
    """--tool-format: how a served model writes tool calls; AUTO is told by its chat template."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    NONE = "none"
