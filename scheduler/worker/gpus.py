"""What the GPUs' driver says, where there is one."""

from __future__ import annotations

import pynvml
import structlog

from scheduler.worker.snapshots import GpuRow

log = structlog.get_logger(__name__)


class Gpus:
    """NVML. A machine without the driver has no rows; a GPU that fails to answer is left out of that reading."""

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self._handles = []

    def read(self) -> list[GpuRow]:
        """One row per GPU. Blocks for a few milliseconds when there are any: call it in a thread."""
        rows = []
        for handle in self._handles:
            try:
                rows.append(_row(handle))
            except pynvml.NVMLError as error:
                log.debug("gpu does not answer", error=str(error))
        return rows


def _row(handle: object) -> GpuRow:
    name = pynvml.nvmlDeviceGetName(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuRow(
        name=name.decode() if isinstance(name, bytes) else str(name),
        utilisation=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        memory_used=int(memory.used),
        memory_total=int(memory.total),
    )
