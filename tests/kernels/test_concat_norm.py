"""The joined input of a draft module has the bits of its parts, in kernel and twin."""

import pytest
import torch

from unisono.kernels.norm.concat_norm import concat_norm, launch_concat_norm
from unisono.kernels.norm.rms_norm import launch_rms_norm, rms_norm


@pytest.mark.parametrize("twin", [False, True], ids=["kernel", "twin"])
@pytest.mark.parametrize("size", [24, 257, 4096])
def test_bits_are_the_norms(twin, size, dtype, device):
    device = "cpu" if twin else device
    join, norm = (concat_norm.cpu, rms_norm.cpu) if twin else (launch_concat_norm, launch_rms_norm)
    shapes = (11, size), (5, size), (size,), (size,)
    table, hidden, one, other = (torch.randn(shape).to(device, dtype) for shape in shapes)
    ids = torch.tensor([3, 10, 0, 3, 7], dtype=torch.int32, device=device)
    want = torch.cat((norm(table[ids.long()], one, 1e-5), norm(hidden, other, 1e-5)), 1)
    assert torch.equal(join(ids, table, hidden, one, other, 1e-5), want)


def test_op_traces_by_shape():
    given = (torch.tensor([1, 0]).int(), *(torch.randn(shape) for shape in ((4, 6), (2, 6), (6,), (6,))), 1e-5)
    torch.library.opcheck(torch.ops.unisono.concat_norm.default, given)
