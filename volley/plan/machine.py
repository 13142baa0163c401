"""The hardware of a plan: what one device can do, how many there are, and how they are connected."""

import json
import math
from pathlib import Path

from pydantic import Field, ValidationError

from volley.base import Spec
from volley.errors import JobError

GIB = 1 << 30
NIC_SHARE = 0.7  # share of a network card's line rate that transfers reach


class Device(Spec):
    """One GPU, or one process of a CPU machine, and the shares of its peak rates that each stage reaches."""

    name: str = Field(min_length=1)
    memory_gib: float = Field(gt=0, description="memory of the GPU, or of the CPU machine")
    tflops: float = Field(gt=0, description="matmuls in the model's dtype, 1e12 FLOP/s")
    memory_gb_s: float = Field(gt=0, description="reading memory, 1e9 bytes/s")
    host_gb_s: float = Field(20.0, gt=0, description="between host and GPU; on a CPU, copying")
    link_gb_s: float = Field(20.0, gt=0, description="between the GPUs of a node")
    train_share: float = Field(0.4, gt=0, le=1, description="of the peak FLOP/s in training")
    prefill_share: float = Field(0.5, gt=0, le=1, description="of the peak FLOP/s in generation")
    decode_share: float = Field(0.6, gt=0, le=1, description="of the memory bandwidth in generation")
    write_gb_s: float | None = Field(None, gt=0, description="writing activations; null: memory_gb_s")
    update_us: float = Field(50_000.0, ge=0, description="overhead of an update, 1e-6 s")
    train_layer_us: float = Field(400.0, ge=0, description="overhead per layer, forward and backward, 1e-6 s")
    decode_layer_us: float = Field(20.0, ge=0, description="overhead per layer and token step of an engine")
    step_us: float = Field(1000.0, ge=0, description="overhead per token step of an engine")
    sample_us: float = Field(5.0, ge=0, description="overhead per token of a sample in an engine")
    sample_layer_us: float = Field(0.0, ge=0, description="overhead per layer and token of a sample in an engine")
    publish_us: float = Field(50_000.0, ge=0, description="overhead of publishing a version")
    publish_layer_us: float = Field(500.0, ge=0, description="overhead of publishing, per layer")
    load_copies: int = Field(1, ge=1, description="copies between a host's object store and the engine's weights")
    cache_block: int = Field(16, ge=1, description="tokens of a block of the engine's prefix cache")
    gpu: bool = True


# Memory, dense bfloat16 matmuls, memory bandwidth and NVLink (one direction) from NVIDIA's data sheets.
PRESETS = {
    device.name: device
    for device in (
        Device(name="a100", memory_gib=80, tflops=312, memory_gb_s=2039, link_gb_s=300),
        Device(name="h100", memory_gib=80, tflops=989, memory_gb_s=3350, link_gb_s=450),
        Device(name="h200", memory_gib=140, tflops=989, memory_gb_s=4800, link_gb_s=450),
        Device(name="l40s", memory_gib=45, tflops=362, memory_gb_s=864, link_gb_s=20),
    )
}


class Hardware(Spec):
    """What a plan is made for.

    Attributes:
        gpus: GPUs in all nodes; 0 for a CPU machine.
        host_gib: memory of a node's host; None for that of a CPU machine, and to leave it unchecked beside GPUs.
    """

    device: Device
    gpus: int = Field(ge=0)
    gpus_per_node: int = Field(8, ge=1)
    nic_gbit: float = Field(100.0, gt=0)
    host_gib: float | None = Field(None, gt=0)

    def nodes(self, gpus: float) -> int:
        """Nodes that ``gpus`` GPUs fill."""
        return max(1, math.ceil(gpus / self.gpus_per_node - 1e-9))

    @property
    def nic_bytes(self) -> float:
        """Bytes per second between two nodes."""
        return self.nic_gbit / 8 * 1e9 * NIC_SHARE

    def link_bytes(self, gpus: float) -> float:
        """Bytes per second over the slowest link of a ring of ``gpus`` GPUs, which fill one node after another."""
        within = self.device.link_gb_s * 1e9
        return within if gpus <= self.gpus_per_node else min(within, self.nic_bytes)


def read_device(path: Path) -> Device:
    """Read a device from a JSON file, as ``python -m benchmarks.plan --machine FILE`` writes it.

    Raises:
        JobError: the file is missing, is not JSON, or does not describe a device.
    """
    try:
        return Device.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise JobError(f"machine file {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise JobError(f"machine file {path}: {where + ': ' if where else ''}{first['msg']}") from error
    except ValueError as error:
        raise JobError(f"machine file {path} is not JSON: {error}") from error
