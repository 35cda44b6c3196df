# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An installed package does what it says: an op, a gradient, a fake call, the report."""

import warnings

import torch

import custom
from custom import doctor, info


def main() -> None:
    # the smoke environments may have no numpy
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    assert "site-packages" in custom.__file__, f"imported from {custom.__file__}"
    q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
    indices, _ = custom.npu_lightning_indexer(q, k, w, sparse_count=4)
    assert indices.shape == (1, 2, 1, 4) and (indices[:, :, 0].sort(-1).values >= -1).all()
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (3, 5, 5))
    out = custom.npu_fused_attention(q, k, v)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, plain)
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    lines = "\n".join(info.report())
    assert f"npu-custom-ops {custom.__version__}" in lines and "npu_sparse_attention_pto" in lines
    unexpected = [str(each) for each in doctor.clashes(doctor.here())]
    assert not unexpected, unexpected
    print(f"  npu-custom-ops {custom.__version__}, torch {torch.__version__}: an op, a gradient")


if __name__ == "__main__":
    main()
