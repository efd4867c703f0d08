"""Softmax on the CPU in the next wider type, rounded once: the closest result that the dtype can hold."""

import numpy as np

from minikernel import Backend, Kernel, Problem

# float64 gains where the platform's long double is wider than a double, as on x86.
_WIDER = {"float16": np.float64, "float32": np.float64, "float64": np.longdouble}


def prepare(problem: Problem) -> Kernel:
    wider = _WIDER[problem.dtype]
    logarithm = problem.op == "log_softmax"

    def run(x, out, stream, scratch):
        with np.errstate(all="ignore"):  # NaN and infinities are answers here, not accidents
            shifted = x.astype(wider)
            shifted -= shifted.max(axis=1, keepdims=True)
            exponentials = np.exp(shifted)
            total = exponentials.sum(axis=1, keepdims=True)
            out[...] = shifted - np.log(total) if logarithm else exponentials / total

    return Kernel(run)


BACKEND = Backend(
    name="exact",
    rank=45,  # after every GPU backend, before numpy (50): the first choice for arrays in host memory
    devices=("cpu",),
    dtypes=tuple(_WIDER),
    prepare=prepare,
)
