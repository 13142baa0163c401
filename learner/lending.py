"""Lends weights to engines that take turns with the learner on the same device.

On CPU a bucket is a file in memory, which the engine maps. On a GPU it is a list of handles to the weights themselves,
which the engine reads before the learner leaves the device.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from learner.weights import file_parts
from volley.gpu_handles import header_of
from volley.weight_files import WeightFile


class LentBucket:
    """A bucket whose ``path`` an engine's process can open until `take_back`.

    Attributes:
        nbytes: of all tensors.
        copied: whether the weights may change meanwhile.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.copied = all(tensor.device.type == "cpu" for tensor in tensors.values())
        if self.copied:
            parts = [part.numpy() for part in file_parts(dict(tensors))]
            self._file = WeightFile(*parts)
        else:
            self._file = WeightFile(header_of(tensors))
        self.path = self._file.path
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def arrays(self) -> tuple[NDArray[np.uint8]]:
        """The content of the file, uint8 [bytes]."""
        return (self._file.read(),)

    def take_back(self) -> None:
        """Close the file."""
        self._file.close()
