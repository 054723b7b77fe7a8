"""A lower bound for AlexNet's training step on a GPU, from its floating-point operations and its bytes.

Each kernel that a well-built step needs takes at least the longer of two times: its operations over the rate
of the matrix units, its bytes over the rate of the memory (each input read once, each output written once,
activations in bfloat16). The sum over the kernels is the floor of a step that runs them one after the other.

For a batch of 256 images of 227 x 227, in theano_alexnet's form, which pools before it normalises:
- convolutions and fully connected layers: forward, and two products of the same size backward (the first
  convolution has no use for its input's gradient): 1,059 GFLOP;
- pooling, normalisation, and rectifiers that no pooling follows: their tensors in and out;
- SGD with momentum: 20 bytes a parameter (reads gradient bfloat16, weight and momentum float32; writes both,
  and the weight in bfloat16);
- crop, mirror and mean: uint8 256 x 256 x 3 in, bfloat16 227 x 227 x 3 out.

With 790 TFLOP/s and 4.3 TB/s, as an H200 shows in a matrix product of 8,192 x 8,192 in bfloat16 and in a
copy on the device, that is 1.98 ms: 129,000 images a second. Only by fusing kernels, or by running
memory-bound ones beside others, could a step take less.
"""

from dataclasses import dataclass

H200_FLOPS = 790e12  # measured, not the 989 of the data sheet
H200_BYTES = 4.3e12  # read plus written, measured, not the 4.8 of the data sheet
_BATCH = 256
_BFLOAT16 = 2


@dataclass(frozen=True)
class _Layer:
    """macs: multiplications and additions of the forward pass for one image; parameters: with biases."""

    macs: int
    parameters: int
    n_products: int = 3  # forward, input's gradient, weights' gradient


def _convolution(size: int, kernel: int, inputs: int, outputs: int, n_products: int = 3) -> _Layer:
    """size: rows and columns of the output; inputs: of one group."""
    weights = kernel * kernel * inputs * outputs
    return _Layer(size * size * weights, weights + outputs, n_products)


_CONVOLUTIONS = (
    _convolution(55, 11, 3, 96, n_products=2),
    _convolution(27, 5, 48, 256),
    _convolution(13, 3, 256, 384),
    _convolution(13, 3, 192, 384),
    _convolution(13, 3, 192, 256),
)
_LINEAR = tuple(
    _Layer(inputs * outputs, inputs * outputs + outputs)
    for inputs, outputs in ((9216, 4096), (4096, 4096), (4096, 1000))
)
LAYERS = _CONVOLUTIONS + _LINEAR
_POOLED = ((55 * 55 * 96, 27 * 27 * 96), (27 * 27 * 256, 13 * 13 * 256), (13 * 13 * 256, 6 * 6 * 256))
_NORMALISED = (27 * 27 * 96, 13 * 13 * 256)
_RECTIFIED = (13 * 13 * 384, 13 * 13 * 384)  # after the third and fourth convolution


def seconds(flops: float, bytes_per_second: float) -> float:
    """The floor of one training step of 256 images."""

    def moved(n_elements: float) -> float:
        return n_elements * _BATCH * _BFLOAT16 / bytes_per_second

    total = 0.0
    for layer in LAYERS:
        weights_time = layer.parameters * _BFLOAT16 / bytes_per_second
        total += layer.n_products * max(2 * layer.macs * _BATCH / flops, weights_time)
    for before, after in _POOLED:  # backward: gradient in and out, and the input to find the largest again
        total += moved(before + after) + moved(after + 2 * before)
    total += sum(moved(2 * n) + moved(3 * n) for n in _NORMALISED)
    total += sum(moved(3 * n) for n in _RECTIFIED)
    total += 20 * sum(layer.parameters for layer in LAYERS) / bytes_per_second
    prepared = 256 * 256 * 3 / _BFLOAT16 + 227 * 227 * 3
    return total + moved(prepared)


def images_per_second(flops: float = H200_FLOPS, bytes_per_second: float = H200_BYTES) -> float:
    """Return the predicted rate of AlexNet on a device with these limits."""
    return _BATCH / seconds(flops, bytes_per_second)
