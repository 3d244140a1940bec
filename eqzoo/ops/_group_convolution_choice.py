"""Which group convolutions are faster through the irreps of the group, on a CPU."""

from ..groups import Group

__all__ = ["faster", "faster_in_bfloat16"]

# From how many fields in and out k x k filters are faster through the irreps, for each order of a group, and from how
# many C·C' 1 x 1 filters, with channels last and contiguous. From docs/benchmarks/group_convolution_shapes_cpu.md.
_LEAST_FIELDS = {2: 32, 4: 12, 8: 7}
_LEAST_PRODUCTS = {2: (4096, 16384), 4: (576, 256), 8: (144, 144)}
# The numbers of one contiguous image, field and output, from which 1 x 1 filters alone pay only in training.
_CACHED = 192 * 1024
# In bfloat16, from which C·C'/(C + C'), what is saved over what it costs: of k x k and of 1 x 1 filters, with channels
# last in inference and in training, and contiguous in both. From group_convolution_shapes_cpu_bfloat16.md there.
_LEAST_IN_BFLOAT16 = {
    2: ((32, 24, 32, 24), (128, 64, 128, 64)),
    4: ((18, 10.5, 10.5, 10.5), (48, 32, 6, 6)),
    8: ((12.5, 7.4, 7.4, 7.4), (32, 19, 8, 8)),
}


def faster(
    group: Group, channels: int, out_channels: int, side: int, pixels: int, last: bool, trains: bool = True
) -> bool:
    """Whether the irreps are the faster way on a CPU, by measurement in float32.

    What they save are products, C C' k² a pixel; what they cost are transforms of (C + C') k² numbers, and with
    contiguous fields their transposition, which costs no more than torch's own where it pays for one too. So k x k
    filters pay from few fields, 1 x 1 filters from more.
    """
    fewest = min(channels, out_channels)
    if side > 1:
        return fewest >= _LEAST_FIELDS[group.order]
    least = _LEAST_PRODUCTS[group.order][0 if last else 1]
    fewest_of_all = (16 if group.order == 4 else 12) if last else 8
    if not last and (channels + out_channels) * group.order * pixels >= _CACHED:
        if not trains:
            return False
        fewest_of_all = 12
    return channels * out_channels >= least and fewest >= fewest_of_all


def faster_in_bfloat16(
    group: Group, channels: int, out_channels: int, side: int, last: bool, trains: bool = True
) -> bool:
    """The same in bfloat16, where both forms use the processor's bfloat16 products.

    These cost little beside the transforms, which are computed in float32: irreps pay from more fields on. The expanded
    form of contiguous fields pays for transposing them too.
    """
    least = _LEAST_IN_BFLOAT16[group.order][side == 1]
    return channels * out_channels / (channels + out_channels) >= least[trains if last else 2 + trains]
