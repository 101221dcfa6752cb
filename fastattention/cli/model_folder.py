"""A Transformers model folder: its model, and text to tokens and back. Importing this module imports Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from fastattention.cli.choices import AttnImplementation, ModelDtype
from fastattention.cli.console import check_model_folder, first_line, usable_devices
from fastattention.errors import ArgumentError, FastAttentionError

# A folder with any of these files has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
BYTE_VOCABULARY = 256


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> Tensor:
        """Tokens of a prompt, int64 (1, seqlen)."""

    def decode(self, tokens: int | list[int]) -> str:
        """Text of one token or of several: streamers of Transformers ask for either."""


class ByteCodec:
    """For models without a tokenizer whose vocabulary is the 256 bytes; a text begins with bos_token_id, if any."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._bos: int | None = config.bos_token_id

    def encode(self, text: str) -> Tensor:
        """The bytes of UTF-8."""
        start = [] if self._bos is None else [self._bos]
        return torch.tensor([[*start, *text.encode()]], dtype=torch.int64, device="cpu")

    def decode(self, tokens: int | list[int]) -> str:
        """Text of UTF-8 bytes; invalid ones become U+FFFD."""
        if isinstance(tokens, int):
            tokens = [tokens]
        return bytes(token for token in tokens if token != self._bos).decode(errors="replace")


class TokenizerCodec:
    """The folder's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, text: str) -> Tensor:
        """Tokens of a text, with the special tokens that the tokenizer adds."""
        tokens = self._tokenizer(text, return_tensors="pt").input_ids
        assert isinstance(tokens, Tensor)
        return tokens

    def decode(self, tokens: int | list[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model folder. Raises ArgumentError for a folder without one, and for a damaged file."""
    check_model_folder(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # readers of Transformers may raise anything for a damaged file
        raise ArgumentError(f"model {str(folder)!r} cannot be read: {first_line(error)}") from error


class LoadedModel(NamedTuple):
    """A model ready to generate, and its codec."""

    model: PreTrainedModel
    codec: Codec


def load_folder(folder: Path, attention: AttnImplementation, dtype: ModelDtype, device: str) -> LoadedModel:
    """Load the causal language model in `folder`; nothing is downloaded.

    dtype: AUTO takes the one in which it was stored.
    Raises ArgumentError for a folder without a model or a way to make tokens, and for a device that is not there.
    """
    check_model_folder(folder)
    check_device(device)
    if attention is AttnImplementation.FAST_ATTENTION:
        from fastattention.integrations.transformers import register

        register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the commands have their own
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention.value, dtype=dtype.value, local_files_only=True
        )
        codec = _codec(folder, model.config)
    except (FastAttentionError, MemoryError):
        raise
    except Exception as error:  # readers of Transformers may raise anything for a damaged file
        raise ArgumentError(f"model {str(folder)!r} cannot be loaded: {error}") from error
    torch.nn.Module.to(model, device)
    model.eval()  # type: ignore[no-untyped-call]
    return LoadedModel(model, codec)


def check_device(device: str) -> None:
    """Checks a device by copying a value there and back: torch accepts names of devices that it cannot use."""
    try:
        torch.zeros(1, device=device, dtype=torch.float32).tolist()
    except Exception as error:  # each kind of device raises its own errors
        raise ArgumentError(f"device={device!r} cannot be used: {first_line(error)}; use {usable_devices()}") from error


def _codec(folder: Path, config: PretrainedConfig) -> Codec:
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return TokenizerCodec(folder)
    if config.vocab_size == BYTE_VOCABULARY:
        return ByteCodec(config)
    raise ArgumentError(
        f"model {str(folder)!r} has no tokenizer ({', '.join(TOKENIZER_FILES)}), and its vocabulary of "
        f"{config.vocab_size} is not the {BYTE_VOCABULARY} bytes, which need none"
    )
