"""Memory bandwidth: as measured by reading, and as stated by the vendor."""

from __future__ import annotations

import re
import time

import torch

from hf_slospec.model.transfer import synchronize

NUM_READS = 10
READ_BYTES = {"cuda": 2**32, "cpu": 2**26}
# Bytes per second by the vendors' datasheets; the first pattern found in the device's name counts.
DATASHEETS = {
    r"H100 PCIe": 2.0e12,
    r"H100 80GB HBM3": 3.35e12,
    r"H200": 4.8e12,
    r"A100.*80GB": 2.04e12,
    r"A100.*40GB": 1.56e12,
    r"L40S": 0.864e12,
    r"RTX 4090$": 1.008e12,
    r"\bA10\b": 0.6e12,
    r"\bL4\b": 0.3e12,
    r"\bT4\b": 0.32e12,
}


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of the fastest of several sums and maxima over a large buffer on
    the device.
    """
    num_bytes = READ_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for read in (torch.sum, torch.amax):
        read(buffer)
        for _ in range(NUM_READS):
            synchronize(device)
            begun_s = time.perf_counter()
            read(buffer)
            synchronize(device)
            seconds.append(time.perf_counter() - begun_s)
    return buffer.nbytes / min(seconds)


def datasheet_bandwidth(name: str | None) -> float | None:
    """Return the bytes per second that the vendor states for a GPU of this name; None if it is not
    in the table.
    """
    return next(
        (rate for pattern, rate in DATASHEETS.items() if name and re.search(pattern, name)), None
    )
