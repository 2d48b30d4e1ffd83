from typing import Any

import numpy as np

# The kernels (cpp/bind/kernels.cpp). Addresses are integers; dtype codes: 0 fp32, 1 bf16, 2 fp16; threads 0: the default.
# Every call releases the GIL. ValueError: an unknown code or level, a null address, a wrong hyper record.
BLOCK: int
GROUP: int

def simd_level() -> str: ...
def simd_levels() -> list[str]: ...
def default_threads() -> int: ...
def physical_cores(cpus: set[int], root: str = "") -> int: ...
def quota_cpus(root: str = "") -> int: ...
def adamw(
    master: int,
    grad: int,
    grad_dtype: int,
    exp_avg: int,
    exp_avg_sq: int,
    out: int,
    out_dtype: int,
    n: int,
    hyper: np.ndarray[Any, Any],
    threads: int = 0,
    level: str | None = None,
) -> None: ...

# arrays: addresses of master, low, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, out; 0 for what the form, the rule or the
# caller has not. form: codes of master (0 fp32, 1 split), moments (0 fp32, 1 bf16, 2 int8), grad's dtype, out's dtype.
def update(
    arrays: tuple[int, ...],
    form: tuple[int, int, int, int],
    first: int,
    n: int,
    hyper: np.ndarray[Any, Any],
    threads: int = 0,
    level: str | None = None,
) -> None: ...
def split(high: int, low: int, src: int, n: int, threads: int = 0, level: str | None = None) -> None: ...
def join(dst: int, high: int, low: int, n: int, threads: int = 0, level: str | None = None) -> None: ...
def encode(codes: int, scales: int, src: int, with_sign: bool, n: int, threads: int = 0, level: str | None = None) -> None: ...
def decode(dst: int, codes: int, scales: int, with_sign: bool, n: int, threads: int = 0, level: str | None = None) -> None: ...
def land(
    dst: int,
    dst_dtype: int,
    src: int,
    src_dtype: int,
    n: int,
    accumulate: bool = False,
    scale: float = 1.0,
    block_sums: int = 0,
    threads: int = 0,
    level: str | None = None,
) -> None: ...
def sumsq(src: int, dtype: int, n: int, block_sums: int, threads: int = 0, level: str | None = None) -> None: ...
def convert(dst: int, dst_dtype: int, src: int, src_dtype: int, n: int, threads: int = 0, level: str | None = None) -> None: ...
def scale(dst: int, dtype: int, n: int, factor: float, threads: int = 0, level: str | None = None) -> None: ...
def copy(dst: int, src: int, nbytes: int, threads: int = 0, level: str | None = None) -> None: ...
def tune_malloc() -> bool: ...
def trim() -> bool: ...

# The engines and the pipeline (cpp/bind/io.cpp).
def __getattr__(name: str) -> Any: ...
