// ReLU followed by max pooling, in float32 or bfloat16, on numbers (image, row, column, channel). lockstep/network/layers.py is an
// implementation in torch. Windows are square, without padding.
//
// Forward, a thread writes CHUNK neighbouring channels of one output, 16 bytes, and for each a byte: the place of the first
// maximum in the window, row by row, or NONE if no number is above zero. Backward, a thread gathers the gradients of the
// outputs whose maxima are its CHUNK numbers. So no memory is zeroed first, and sums have a fixed order.
//
// An optional bias, one number per channel, which the convolution before this layer has left out, is added to the maximum, and
// the sum is rounded. Rounding is monotonic, so the outputs are those of a bias added to every number. The bias's gradient is
// the sum of the gradients of outputs above zero.
//
// The usual form, SIZE 3 and STRIDE 2, is compiled with these numbers: its loops over a window are unrolled, so that a thread's
// loads are on their way together. 0 stands for any number. A tensor has fewer than 2^31 numbers, so 32 bits count them.

#include "numbers.cuh"

typedef unsigned int uint;

template <int CHUNK>
struct alignas(CHUNK) Places {
    unsigned char of[CHUNK];
};
enum { NONE = 255 };

// Rows and columns of the images and of the outputs; chunks per pixel; the window's size and stride.
struct Form {
    uint rows, columns, out_rows, out_columns, n_chunks, size, stride;
};

template <int SIZE, int STRIDE, typename Chunk>
__device__ inline void forward(
    const Chunk *x, const Chunk *bias, Chunk *y, Places<Chunk::CHUNK> *places, uint n, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    const uint size = SIZE ? SIZE : form.size, stride = STRIDE ? STRIDE : form.stride;
    const float lowest = __uint_as_float(0xff800000u); // minus infinity
    for (uint i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        uint chunk = i % form.n_chunks, pixel = i / form.n_chunks;
        uint column = pixel % form.out_columns, line = pixel / form.out_columns;
        uint row = line % form.out_rows, image = line / form.out_rows;
        uint corner = (image * form.rows + row * stride) * form.columns + column * stride;
        float best[CHUNK];
        Places<CHUNK> place;
        for (int c = 0; c < CHUNK; c++) {
            best[c] = lowest;
            place.of[c] = NONE;
        }
        for (uint down = 0; down < size; down++)
            for (uint right = 0; right < size; right++) {
                Chunk given = x[(corner + down * form.columns + right) * form.n_chunks + chunk];
                for (int c = 0; c < CHUNK; c++) {
                    float value = widen(given.of[c]);
                    if (value > best[c] || value != value) {
                        best[c] = value;
                        place.of[c] = (unsigned char)(down * size + right);
                    }
                }
            }
        Chunk made, added = bias ? bias[chunk] : Chunk{};
        for (int c = 0; c < CHUNK; c++) {
            narrow(&made.of[c], bias ? best[c] + widen(added.of[c]) : best[c]);
            if (widen(made.of[c]) <= 0.0f) { // false for NaN
                narrow(&made.of[c], 0.0f);
                place.of[c] = NONE;
            }
        }
        y[i] = made;
        places[i] = place;
    }
}

template <int SIZE, int STRIDE, typename Chunk>
__device__ inline void backward(
    const Chunk *gradient, const Places<Chunk::CHUNK> *places, Chunk *out, uint n, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    const uint size = SIZE ? SIZE : form.size, stride = STRIDE ? STRIDE : form.stride;
    const uint most = (size + stride - 1) / stride; // windows over a number, along an axis
    for (uint i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        uint chunk = i % form.n_chunks, pixel = i / form.n_chunks;
        uint column = pixel % form.columns, line = pixel / form.columns;
        uint row = line % form.rows, image = line / form.rows;
        // The first window that contains this number; the last one begins here or before.
        uint top = row < size ? 0 : (row - size) / stride + 1;
        uint left = column < size ? 0 : (column - size) / stride + 1;
        float sum[CHUNK] = {};
        for (uint down = 0; down < most; down++)
            for (uint right = 0; right < most; right++) {
                uint above = top + down, before = left + right;
                if (above >= form.out_rows || above * stride > row || before >= form.out_columns || before * stride > column)
                    continue;
                uint place = (row - above * stride) * size + column - before * stride;
                uint at = ((image * form.out_rows + above) * form.out_columns + before) * form.n_chunks + chunk;
                Places<CHUNK> taken = places[at];
                Chunk given = gradient[at];
                for (int c = 0; c < CHUNK; c++)
                    sum[c] += taken.of[c] == place ? widen(given.of[c]) : 0.0f;
            }
        Chunk made;
        for (int c = 0; c < CHUNK; c++)
            narrow(&made.of[c], sum[c]);
        out[i] = made;
    }
}

// A thread sums CHUNK channels of the gradient over every n_parts-th pixel. `sums`, float32 (part, channel), has one row per
// part; the caller adds the rows. n: chunks of `sums`.
template <typename Chunk>
__device__ inline void bias_gradient(
    const Chunk *gradient, const Places<Chunk::CHUNK> *places, float *sums, uint n, uint n_chunks, uint n_pixels, uint n_parts)
{
    enum { CHUNK = Chunk::CHUNK };
    for (uint i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float sum[CHUNK] = {};
        for (uint pixel = i / n_chunks; pixel < n_pixels; pixel += n_parts) {
            uint at = pixel * n_chunks + i % n_chunks;
            Places<CHUNK> taken = places[at];
            Chunk given = gradient[at];
            for (int c = 0; c < CHUNK; c++)
                sum[c] += taken.of[c] == NONE ? 0.0f : widen(given.of[c]);
        }
        for (int c = 0; c < CHUNK; c++)
            sums[(unsigned long long)i * CHUNK + c] = sum[c];
    }
}

// n: chunks of the output. bias may be null.
extern "C" __global__ void pool_forward_float32(
    const Floats *x, const Floats *bias, Floats *y, Places<4> *places, uint n, Form form)
{
    if (form.size == 3 && form.stride == 2)
        forward<3, 2>(x, bias, y, places, n, form);
    else
        forward<0, 0>(x, bias, y, places, n, form);
}

extern "C" __global__ void pool_forward_bfloat16(
    const Bfloats *x, const Bfloats *bias, Bfloats *y, Places<8> *places, uint n, Form form)
{
    if (form.size == 3 && form.stride == 2)
        forward<3, 2>(x, bias, y, places, n, form);
    else
        forward<0, 0>(x, bias, y, places, n, form);
}

extern "C" __global__ void pool_backward_float32(
    const Floats *gradient, const Places<4> *places, Floats *out, uint n, Form form)
{
    if (form.size == 3 && form.stride == 2)
        backward<3, 2>(gradient, places, out, n, form);
    else
        backward<0, 0>(gradient, places, out, n, form);
}

extern "C" __global__ void pool_backward_bfloat16(
    const Bfloats *gradient, const Places<8> *places, Bfloats *out, uint n, Form form)
{
    if (form.size == 3 && form.stride == 2)
        backward<3, 2>(gradient, places, out, n, form);
    else
        backward<0, 0>(gradient, places, out, n, form);
}

extern "C" __global__ void pool_bias_float32(
    const Floats *gradient, const Places<4> *places, float *sums, uint n, uint n_chunks, uint n_pixels, uint n_parts)
{
    bias_gradient(gradient, places, sums, n, n_chunks, n_pixels, n_parts);
}

extern "C" __global__ void pool_bias_bfloat16(
    const Bfloats *gradient, const Places<8> *places, float *sums, uint n, uint n_chunks, uint n_pixels, uint n_parts)
{
    bias_gradient(gradient, places, sums, n, n_chunks, n_pixels, n_parts);
}
