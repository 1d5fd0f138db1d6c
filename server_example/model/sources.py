"""Where the loader takes tensors from: safetensors with Hugging Face names, or random numbers for timing."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from moe_fp8.errors import ModelError
from server_example.model.config import FP8_BLOCK, ModelConfig
from server_example.model.layers import Fp8Weight

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


class Source(Protocol):
    """Gives every tensor of the model by its name in the checkpoint."""

    device: torch.device

    def full(self, name: str, *shape: int) -> torch.Tensor:
        """An unquantized tensor, as fp32 on the device."""

    def fill(self, name: str, into: Fp8Weight) -> None:
        """Writes `name.weight` and its scales into `into` [N, K], which may be rows of a larger weight."""

    def finish(self) -> None:
        """Raises if the source has tensors that the model did not take."""


class Checkpoint:
    """The tensors of a folder, read one at a time when they are taken. Every mismatch raises `ModelError`.

    The files are those of `model.safetensors.index.json` if there is one, else all `*.safetensors`.
    """

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device) -> None:
        self.device = device
        layers = ModelConfig.load(folder).num_hidden_layers
        #: The layers that `config` leaves out, and those that predict further tokens (MTP).
        self._layers_not_run = range(config.num_hidden_layers, layers + config.num_nextn_predict_layers)
        self._tied = config.tie_word_embeddings
        self._files: dict[str, Any] = {}
        self._left: dict[str, str] = {}
        index = folder / INDEX
        listed = _read_index(index) if index.is_file() else None
        names = sorted(
            {path.name for path in folder.glob("*.safetensors")} if listed is None else set(listed.values())
        )
        for name in names:
            self._open(folder / name)
        if listed is not None:
            for tensor, file in listed.items():
                if self._left.get(tensor) != file:
                    raise ModelError(tensor, f"in {file}, as {INDEX} says", self._left.get(tensor))
        if not self._left:
            raise ModelError("model", "a folder with *.safetensors", str(folder))

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ModelError(str(path), "a readable safetensors file", str(error)) from error
        for name in names:
            if name in self._left:
                raise ModelError(
                    name, "one tensor of this name", f"one in {self._left[name]} and {path.name}"
                )
            self._left[name] = path.name
        self._files[path.name] = file

    def take(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """The tensor on the CPU, of this shape and one of `dtypes`."""
        file = self._left.pop(name, None)
        if file is None:
            raise ModelError(name, f"a tensor of shape {shape}", None, "the checkpoint lacks it")
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:  # Such as a dtype that torch does not have.
            raise ModelError(name, "a tensor that torch can read", str(error)) from error
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            names = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            raise ModelError(name, f"{names} of shape {shape}", f"{tensor.dtype} {tuple(tensor.shape)}")
        return tensor

    def full(self, name: str, *shape: int) -> torch.Tensor:
        # An FP8 tensor without its scale, or an integer tensor, would load as numbers without meaning.
        tensor = self.take(name, shape, torch.bfloat16, torch.float16, torch.float32)
        return tensor.to(self.device, torch.float32)

    def fill(self, name: str, into: Fp8Weight) -> None:
        n, k = into.weight.shape
        # Despite its name, the scale multiplies.
        blocks = (-(-n // FP8_BLOCK), k // FP8_BLOCK)
        into.weight.copy_(self.take(f"{name}.weight", (n, k), torch.float8_e4m3fn))
        into.scale.copy_(self.take(f"{name}.weight_scale_inv", blocks, torch.float32))

    def finish(self) -> None:
        """Leaves out layers that are not run, tied copies and derived tables, with a line in the log."""
        known = [name for name in self._left if self._not_run(name)]
        if unknown := sorted(self._left.keys() - set(known)):
            raise ModelError("model", "a checkpoint with only the tensors of its config", unknown[:5])
        if known:
            logger.info("%d tensors are not used, such as %s", len(known), known[0])
        self._left.clear()
        self._files.clear()

    def _not_run(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) in self._layers_not_run:
            return True
        # Published checkpoints of this family list the table of the rotary embedding with each layer.
        return name.endswith(".rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file, from an index of shards."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not found:
            raise ValueError("the weight_map is empty")
        for file in found.values():
            if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
                raise ValueError("a file of the weight_map is not a name in this folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(str(path), 'a JSON object with a "weight_map"', repr(error)) from error
    return dict(found)


class RandomSource:
    """Random weights of a trained model's size: for timing at full size, without a checkpoint.

    Each FP8 matrix is drawn alone and directly in FP8 on the device, so the model needs little more memory
    than its weights. The same device and config give the same weights.
    """

    #: The standard deviation of FP8 values; the largest of a million is then in the upper half of e4m3.
    SPREAD = 64.0

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.device = device
        self._power_of_two = config.power_of_two_scales
        self._generator = torch.Generator(device).manual_seed(0)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def full(self, name: str, *shape: int) -> torch.Tensor:
        if "norm" in name:
            return (
                torch.zeros(shape, device=self.device)
                if name.endswith(".bias")
                else self._normal(*shape) * 0.1 + 1
            )
        if len(shape) == 1:
            return self._normal(*shape) * 0.01
        return self._normal(*shape).mul_(shape[-1] ** -0.5)

    def fill(self, name: str, into: Fp8Weight) -> None:
        scale = into.weight.shape[1] ** -0.5 / self.SPREAD
        into.weight.copy_(self._normal(*into.weight.shape).mul_(self.SPREAD).clamp_(-448, 448))
        into.scale.fill_(2.0 ** round(math.log2(scale)) if self._power_of_two else scale)

    def finish(self) -> None:
        """Nothing can be left."""
