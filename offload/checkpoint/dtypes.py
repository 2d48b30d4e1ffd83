"""Dtypes as safetensors files name them."""

from __future__ import annotations

import torch

# In the order in which safetensors puts tensors: larger elements first, so that each is aligned.
STORED = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
OF_STORED = {name: dtype for dtype, name in STORED.items()}
