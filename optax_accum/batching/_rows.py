"""How a global batch is split over micro-batches and devices."""

import dataclasses

from optax_accum._arguments import checks


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split; see `split_global_batch`.

    Attributes:
      global_batch: the rows of one update.
      num_devices: the devices that share each micro-batch.
      sizes: the rows of each micro-batch, over all devices; they add to
        `global_batch`.
      device_rows: the rows of each micro-batch on the device that has most,
        never more than the maximum asked for.
    """

    global_batch: int
    num_devices: int
    sizes: tuple[int, ...]
    device_rows: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches."""
        return len(self.sizes)

    @property
    def padding(self) -> tuple[int, ...]:
        """The rows of weight zero that each micro-batch needs.

        With these, all devices get the same number of rows. They are fewer
        than the devices.
        """
        rows = zip(self.device_rows, self.sizes, strict=True)
        return tuple(most * self.num_devices - size for most, size in rows)


def split_global_batch(global_batch: int, max_microbatch_size: int, num_devices: int = 1) -> BatchSplit:
    """Returns how to split the batch of one update over devices.

    The batch is the same on any number of devices.

        rows = ceil(global_batch / num_devices)    # on a device
        micro-batches = ceil(rows / max_microbatch_size)

    Args:
      global_batch: the rows of one update.
      max_microbatch_size: the most rows that fit on one device.
      num_devices: the devices along the reduced axes.

    Returns:
      A `BatchSplit`. Its micro-batches differ by at most one row on each
      device. Where `num_devices` does not divide `global_batch`, the last
      is short; pad it by `padding` rows of weight zero.

    Raises:
      TypeError, ValueError: a number that is not an integer of at least 1.

    Guarantees:
      * Any input: no device ever has more than `max_microbatch_size` rows;
        the rows add to `global_batch`; no split with fewer micro-batches
        would fit.
      * Fewer rows than devices: one micro-batch of one row for each device
        that has one.

    Example:
      >>> import optax_accum
      >>> optax_accum.batching.split_global_batch(1000, 64).num_microbatches
      16
      >>> split = optax_accum.batching.split_global_batch(1000, 64, 3)
      >>> split.sizes
      (168, 168, 168, 168, 165, 163)
      >>> split.device_rows, split.padding
      ((56, 56, 56, 56, 55, 55), (0, 0, 0, 0, 0, 2))
    """
    rows = checks.as_count("global_batch", global_batch)
    most = checks.as_count("max_microbatch_size", max_microbatch_size)
    devices = checks.as_count("num_devices", num_devices)
    own = -(-rows // devices)
    count = -(-own // most)
    device_rows = tuple(own // count + (index < own % count) for index in range(count))
    sizes = [size * devices for size in device_rows]
    sizes[-1] -= own * devices - rows
    return BatchSplit(rows, devices, tuple(sizes), device_rows)
