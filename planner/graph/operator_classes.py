"""Classes of operators that reach different fractions of a device's peak, and their memory traffic.

The classes are the keys of :attr:`DeviceSpec.efficiency` (the first four) and of
:attr:`DeviceSpec.bandwidth_by_class` (all). A class without a figure uses the device's plain rates.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache


class OperatorClass(StrEnum):
    """Class of operators with one limiting rate: arithmetic or memory."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION_FORWARD = "attention_forward"
    ATTENTION_BACKWARD = "attention_backward"
    POINTWISE = "pointwise"
    TRANSCENDENTAL = "transcendental"
    COPY = "copy"
    REDUCTION = "reduction"
    NORMALIZATION = "normalization"
    GATHER = "gather"
    SCATTER = "scatter"
    CREATION = "creation"
    OPTIMIZER = "optimizer"


ARITHMETIC = frozenset(
    {
        OperatorClass.MATMUL,
        OperatorClass.CONVOLUTION,
        OperatorClass.ATTENTION_FORWARD,
        OperatorClass.ATTENTION_BACKWARD,
    }
)
"""Classes that are keys of :attr:`DeviceSpec.efficiency`."""

_NAMES = {
    OperatorClass.MATMUL: "mm addmm bmm baddbmm addbmm addmv mv dot linear matmul _scaled_mm _grouped_mm",
    OperatorClass.CONVOLUTION: "convolution convolution_backward _convolution mkldnn_convolution conv1d conv2d conv3d",
    OperatorClass.TRANSCENDENTAL: (
        "gelu gelu_backward silu silu_backward tanh sigmoid exp exp2 expm1 log log1p log2 erf erfc erfinv sin cos tan "
        "pow softplus softplus_backward mish mish_backward elu elu_backward logit atan2 log_sigmoid_forward "
        "log_sigmoid_backward native_dropout"
    ),
    OperatorClass.COPY: (
        "clone copy _to_copy cat stack contiguous lift_fresh_copy constant_pad_nd repeat roll flip "
        "_reshape_copy as_strided_copy"
    ),
    OperatorClass.REDUCTION: (
        "sum mean amax amin max min argmax argmin prod var var_mean std norm linalg_vector_norm any all cumsum cumprod "
        "logsumexp max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d nll_loss_forward topk sort"
    ),
    OperatorClass.NORMALIZATION: (
        "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm "
        "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm "
        "native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
        "rms_norm rms_norm_backward _safe_softmax cudnn_batch_norm cudnn_batch_norm_backward"
    ),
    OperatorClass.GATHER: "embedding index gather index_select take _unsafe_index",
    OperatorClass.SCATTER: (
        "embedding_dense_backward index_put _unsafe_index_put scatter scatter_add index_add slice_backward "
        "select_backward slice_scatter select_scatter nll_loss_backward max_pool2d_with_indices_backward"
    ),
    OperatorClass.OPTIMIZER: "adamw sgd",
    OperatorClass.CREATION: (
        "full full_like zeros zeros_like ones ones_like empty empty_like arange rand rand_like randn randn_like "
        "bernoulli scalar_tensor new_zeros new_ones new_full new_empty eye linspace"
    ),
}  # fmt: skip
_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def operator_name(target: str) -> str:
    """Name of an ATen target without namespace and overload."""
    return target.split(".")[1] if "." in target else target


@cache
def operator_class(target: str) -> OperatorClass:
    """Class of an ATen target such as ``aten.addmm.default``; elementwise arithmetic where nothing else is known."""
    name = operator_name(target)
    if "scaled_dot_product" in name or name.startswith(("_flash_attention", "_efficient_attention")):
        return OperatorClass.ATTENTION_BACKWARD if "backward" in name else OperatorClass.ATTENTION_FORWARD
    return _BY_NAME.get(name, OperatorClass.POINTWISE)


def memory_passes(kind: OperatorClass) -> tuple[bool, int]:
    """Memory traffic of a kernel of this class.

    Returns
    -------
    reads_all_inputs
        Whether it reads its floating-point inputs whole. A gather reads as many rows as it writes; a
        creation reads none.
    output_passes
        How often its outputs' bytes move: a gather reads and writes them, a scatter clears them first.
    """
    match kind:
        case OperatorClass.GATHER:
            return False, 2
        case OperatorClass.SCATTER:
            return True, 2
        case OperatorClass.CREATION:
            return False, 1
        case _:
            return True, 1
